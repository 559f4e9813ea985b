// rank-start PROGRAM ARGS: runs between an MPI launcher and a rank. Reports to the tool which process is which rank,
// before the rank's program takes its time to load, and then executes that program. Uses no libraries, so that no part
// of a rank's life is missed.
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

const char* value_of(char** variables, const char* name) {
  const std::size_t length = std::strlen(name);
  for (; *variables != nullptr; ++variables)
    if (std::strncmp(*variables, name, length) == 0 && (*variables)[length] == '=') return *variables + length + 1;
  return nullptr;
}

/// Without the tool's socket (it may be on another host) the rank starts nevertheless.
void print_variable(const char* name, const char* rank) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::strlen(name);
  if (length + 1 > sizeof address.sun_path) return;
  std::memcpy(address.sun_path + 1, name, length);  // an abstract name
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  char text[64];
  const int size = std::snprintf(text, sizeof text, "start %s\n", rank);
  const auto whole = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), whole) == 0) [[maybe_unused]]
    const ssize_t sent = ::send(fd, text, static_cast<std::size_t>(size), MSG_NOSIGNAL);
  ::close(fd);
}

/// The library is for the launcher; a program that the rank starts may listen where it likes.
void leave_loopback_bind(char** variables) {
  const char* const preloaded = value_of(variables, "LD_PRELOAD");
  if (preloaded == nullptr || std::strstr(preloaded, "/launch/loopback-bind.so") == nullptr) return;
  const char* const others = std::strchr(preloaded, ':');  // it is the first
  if (others == nullptr)
    ::unsetenv("LD_PRELOAD");
  else
    ::setenv("LD_PRELOAD", others + 1, 1);
}

}  // namespace

int main(int argc, char** argv, char** variables) {
  if (argc < 2) return 2;
  leave_loopback_bind(variables);
  const char* const name = value_of(variables, "TESSERA_LAUNCH_SOCKET");
  // In the order of comm/launch.h: a launcher inside another's job passes on the variables of the outer one.
  constexpr const char* kRanks[] = {"OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK",
                                    "PALS_RANKID",          "PMIX_RANK",           "SLURM_PROCID"};
  for (const char* const variable : kRanks) {
    const char* const rank = value_of(variables, variable);
    if (name == nullptr || rank == nullptr) continue;
    print_variable(name, rank);
    break;
  }
  ::execvp(argv[1], argv + 1);
  std::fprintf(stderr, "tessera: can't start '%s': %s\n", argv[1], std::strerror(errno));
  return 127;
}
