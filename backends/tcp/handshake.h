// The two ends of a new connection prove to each other that they belong to the same world, and say which connection
// this is.
#pragma once

#include <utility>  // before Asio's coroutines, which forget it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

using Socket = boost::asio::ip::tcp::socket;

/// Which of the world's connections: `from` connects to `to`.
struct ConnectionId {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t stream = 0;
};

/// The side that was connected to: asks for the proof first, so that it tells strangers nothing. Nothing where the
/// other side fails it, speaks something else or goes.
boost::asio::awaitable<std::optional<ConnectionId>> welcome(Socket& socket, const Bootstrap::Token& token);

/// The side that connects. Returns "" or why it is not accepted.
boost::asio::awaitable<std::string> introduce(Socket& socket, const Bootstrap::Token& token, ConnectionId link);

}  // namespace tessera::comm::tcp
