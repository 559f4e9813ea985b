// TESSERA_MASTER=host:port: the address at which rank 0 listens and to which the other ranks connect; and where rank 0
// listens, as it publishes it in a program's store.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

struct HostPort {
  std::string host;  ///< a name or a numeric address, without brackets
  std::uint16_t port = 0;
  TESSERA_API std::string text() const;  ///< the original spelling
};

/// "node7:29400", "10.0.0.1:29400", "[::1]:29400", "[fe80::1%eth0]:29400". Throws InvalidUsage that names `what`, also
/// if a link-local address lacks its interface, or this host the interface.
TESSERA_API HostPort parse_host_port(const std::string& text, const std::string& what);

/// Listens at a numeric address itself, at "localhost" on both loopback addresses, otherwise at all addresses of this
/// host (since a host's own name may resolve differently on other hosts). Throws InvalidUsage if the port is in use or
/// the address doesn't belong to this host, SystemError.
std::vector<UniqueFd> listen_at(const HostPort& where);

/// Listens at all addresses of this host, at ports that the system chooses. `places` becomes the addresses of this
/// host's interfaces with these ports, loopback last. Throws SystemError.
TESSERA_API std::vector<UniqueFd> listen_at_free_port(std::vector<HostPort>& places);

/// Tries each address of the host once, another one first in each `attempt`: who accepts may not be rank 0. Returns an
/// empty connection if none accepts, with the reason in `why`.
Connection connect_at(const HostPort& where, Deadline deadline, std::string& why, std::size_t attempt = 0);

/// Connects as connect_at() and ends the connection. "", or why that fails.
TESSERA_API std::string connection_problem(const HostPort& where, Deadline deadline);

/// The numeric address of this end; "" for a Unix socket. IPv4 addresses are written as such even on an IPv6 socket.
TESSERA_API std::string own_address(int fd);
TESSERA_API bool is_loopback(const std::string& address);

/// "" if the loopback interface is up, else a sentence that says of `host`, this one, that it is down. Processes on one
/// host connect to each other by it, also to the addresses of other interfaces. Throws SystemError if the system does
/// not list its interfaces.
TESSERA_API std::string loopback_problem(const std::string& host);

/// Sends small frames without delay, and detects a vanished host within half a minute. No effect on a Unix socket.
void tune(int fd);

/// An IPv4 address, the network of an IPv6 address (whose host may use all addresses in it), or "" for a Unix socket.
std::string source_of(const sockaddr_storage& address);

struct TESSERA_API PublishedAddress {
  std::string host;              ///< the name of its host, as Bootstrap::hosts()
  std::string socket;            ///< for ranks on this host: the abstract name of a Unix socket
  Digest token{};                ///< a key that the ranks must know
  std::vector<HostPort> places;  ///< for others, by preference: addresses of its interfaces

  std::string text() const;
  /// Throws SystemError if the text is not one of text().
  static PublishedAddress parse(const std::string& text);
};

/// Opens a Unix socket and a port that the system chooses, and describes them in `address`, which has a new token.
/// Throws SystemError.
std::vector<UniqueFd> listen_for_all(const std::string& host, PublishedAddress& address);

/// connect_at() one of the places, another one in each `attempt`: some may lead elsewhere. There must be one.
Connection connect_at_place(const PublishedAddress& address, std::size_t attempt, Deadline deadline, std::string& why);

}  // namespace tessera::comm
