// The handshake of a new connection: both ends prove that they belong to the same world, and the connecting end
// identifies the connection.
#pragma once

#include <utility>  // before Asio's coroutines, which forget it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

using Socket = boost::asio::ip::tcp::socket;

/// Identifies a connection of the world: `from` connects to `to`.
struct ConnectionId {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t stream = 0;
};

/// Runs on the accepting side. It requests the proof first, so that it discloses nothing to strangers. Returns nothing
/// if the other side fails the proof, uses another protocol or closes the connection.
boost::asio::awaitable<std::optional<ConnectionId>> welcome(Socket& socket, const Bootstrap::Token& token);

/// Runs on the connecting side. Returns "" or why the connection is not accepted.
boost::asio::awaitable<std::string> introduce(Socket& socket, const Bootstrap::Token& token, ConnectionId link);

}  // namespace tessera::comm::tcp
