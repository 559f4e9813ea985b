// TESSERA_MASTER=host:port: where rank 0 listens, and how the others reach it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

struct HostPort {
  std::string host;  ///< a name or a numeric address, without brackets
  std::uint16_t port = 0;
  std::string text() const;  ///< as it was written
};

/// "node7:29400", "10.0.0.1:29400", "[::1]:29400". Throws InvalidUsage that names `what`.
HostPort parse_host_port(const std::string& text, const std::string& what);

/// Listens at a numeric address itself, at "localhost" on both loopback addresses, else at all addresses of this host
/// (what a host's own name means differs from host to host). Throws InvalidUsage where the port is in use or the
/// address is not this host's, SystemError.
std::vector<UniqueFd> listen_at(const HostPort& where);

/// One attempt at all addresses of the host. Empty where nobody answers; `why` then says so.
Connection connect_at(const HostPort& where, Deadline deadline, std::string& why);

/// The numeric address of this side; "" for a Unix socket. An IPv4 address is written as such also on an IPv6 socket.
std::string own_address(int fd);
bool is_loopback(const std::string& address);

/// Small frames leave at once, and a host that vanished is noticed within half a minute. Nothing on a Unix socket.
void tune(int fd);

}  // namespace tessera::comm
