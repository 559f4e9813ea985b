// The handshake of a new connection: both ends prove that they belong to the same world, the connecting end identifies
// the connection, and both derive its keys.
#pragma once

#include <utility>  // before Asio's coroutines, which forget it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/secure_stream.h"

namespace tessera::comm::tcp {

using Socket = boost::asio::ip::tcp::socket;

/// Identifies a connection of the world: `from` connects to `to`.
struct ConnectionId {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint32_t stream = 0;
};

/// Keys that only the two ends of a connection know, one for each direction.
struct ConnectionKeys {
  Digest sending{};    ///< of data that this end sends
  Digest receiving{};  ///< of data that it receives
};

struct Introduction {
  ConnectionId link;
  ConnectionKeys keys;
};

// Both run in `stream`, the bytes of `socket`, which is non-blocking. A TLS session begins first.

/// Whether this side wants the connection of a rank that has proven itself. From then on the other side may hold it for
/// established.
using Admission = std::function<bool(const ConnectionId& link)>;

/// Runs on the accepting side. It requests the proof first, so that it discloses nothing to strangers. Returns nothing
/// if the other side fails the proof, is not admitted, uses another protocol or closes the connection.
boost::asio::awaitable<std::optional<Introduction>> welcome(Socket& socket, SecureStream& stream,
                                                            const Bootstrap::Token& token, const Admission& admits);

/// Runs on the connecting side as `own.link`, and sets `own.keys`. Returns "" or why the connection is not accepted.
boost::asio::awaitable<std::string> introduce(Socket& socket, SecureStream& stream, const Bootstrap::Token& token,
                                              Introduction& own);

}  // namespace tessera::comm::tcp
