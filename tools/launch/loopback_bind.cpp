// Loaded by LD_PRELOAD into an MPI launcher whose ranks are all on this host: what it would bind to all addresses is
// bound to the loopback address. The launchers' protocols have no authentication, and no setting binds their ports.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

extern "C" __attribute__((visibility("default"))) int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  sockaddr_in v4 = {};
  sockaddr_in6 v6 = {};
  if (address != nullptr && address->sa_family == AF_INET && length >= sizeof v4) {
    std::memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return static_cast<int>(::syscall(SYS_bind, fd, &v4, sizeof v4));
  }
  if (address != nullptr && address->sa_family == AF_INET6 && length >= sizeof v6) {
    std::memcpy(&v6, address, sizeof v6);
    if (std::memcmp(&v6.sin6_addr, &in6addr_any, sizeof v6.sin6_addr) == 0) v6.sin6_addr = in6addr_loopback;
    return static_cast<int>(::syscall(SYS_bind, fd, &v6, sizeof v6));
  }
  return static_cast<int>(::syscall(SYS_bind, fd, address, length));
}
