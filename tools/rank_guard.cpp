// rank-guard NAME STARTER FIRST COUNT: beside the ranks that a launcher of the user's own has started on this host, one
// for all of them. Where a rank ends without a word it says so in its place: nobody else there knows which rank it was.
//
// Each rank starts one; the first that gets NAME stays, the others end at once. The ranks connect to it, say who they
// are, and before they end that they do; the first connection that ends without that is of the rank that died, the
// launcher kills the others. COUNT ranks from FIRST on are on this host; before all of them have come it may be one of
// the rest. STARTER is a launcher (0: none) that says much on standard error at its end: then the guard waits for that,
// and speaks last.
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int kFirstRank = 10'000;  // ms until a rank has come
constexpr int kStarter = 5'000;     // until the launcher has ended
constexpr int kTurn = 2;            // for the cause of an abort
constexpr int kMost = 4096;         // descriptors; more ranks on one host are not guarded

struct Rank {
  bool came = false;
  bool ends = false;    ///< by itself, or since the launcher tells it to
  bool aborts = false;  ///< perhaps because of another that died just before
};
Rank ranks[kMost];
int rank_of[kMost];  ///< by connection; -1: it has not said yet

int listen_at(const char* name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::strlen(name);
  if (length + 1 > sizeof address.sun_path) return -1;
  std::memcpy(address.sun_path + 1, name, length);  // an abstract name: gone with this process
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const auto whole = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  const bool ours = fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&address), whole) == 0;
  return ours && ::listen(fd, SOMAXCONN) == 0 ? fd : -1;
}

bool of_this_user(int fd) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

/// Which rank died; -1: none has, and all are gone.
int wait_for_death(int listener) {
  const int events = ::epoll_create1(EPOLL_CLOEXEC);
  const auto watch = [&](int fd) {
    epoll_event wanted = {.events = EPOLLIN | EPOLLRDHUP, .data = {.fd = fd}};
    return ::epoll_ctl(events, EPOLL_CTL_ADD, fd, &wanted) == 0;
  };
  watch(listener);
  int open = 0;
  int suspect = -1;
  for (bool begun = false; !begun || open > 0;) {
    epoll_event event = {};  // one at a time: what came first is the first
    const int patience = suspect >= 0 ? kTurn : begun ? -1 : kFirstRank;
    const int count = ::epoll_wait(events, &event, 1, patience);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return suspect;
    const int fd = event.data.fd;
    if (fd == listener) {
      const int fresh = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      const bool wanted = fresh >= 0 && fresh < kMost && of_this_user(fresh) && watch(fresh);
      if (fresh >= 0 && !wanted) ::close(fresh);
      if (!wanted) continue;
      rank_of[fresh] = -1;
      ++open;
      begun = true;
      continue;
    }
    char text[64] = {};
    const ssize_t got = ::recv(fd, text, sizeof text - 1, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    int& rank = rank_of[fd];
    if (got > 0 && rank < 0) {
      const int said = std::atoi(text);
      if (said >= 0 && said < kMost) rank = said;
    }
    if (got <= 0) {
      ::close(fd);
      --open;
    }
    if (std::strchr(text, 'f') != nullptr) return -1;  // it has failed and said why; the launcher kills the others
    if (rank < 0) continue;
    Rank& one = ranks[rank];
    one.came = true;
    one.ends |= std::strpbrk(text, "et") != nullptr;
    one.aborts |= std::strchr(text, 'a') != nullptr;
    if (got > 0 || one.ends) continue;
    if (!one.aborts) return rank;
    if (suspect < 0) suspect = rank;
  }
  return suspect;
}

/// What the launcher writes to on its standard error; -1: not known.
int errors_of(int process) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/2", process);
  return ::open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
}

/// The line for a rank that died while others of `all` had not come.
int last_line(char* text, std::size_t size, int rank, int first, int all) {
  char missing[512] = {};
  std::size_t length = 0;
  for (int other = first; other < first + all && other < kMost && length + 16 < sizeof missing; ++other)
    if (!ranks[other].came)
      length += static_cast<std::size_t>(
          std::snprintf(missing + length, sizeof missing - length, "%srank %d", length > 0 ? " or " : "", other));
  if (length == 0) return std::snprintf(text, size, "tessera: rank %d died without a word of its own\n", rank);
  return std::snprintf(text, size, "tessera: %s died before it began, or rank %d without a word of its own\n", missing,
                       rank);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int listener = listen_at(argv[1]);
  if (listener < 0) return 0;
  ::setsid();  // out of reach of what the launcher sends to the ranks' group
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  const int starter = std::atoi(argv[2]);
  const int handle = starter > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, starter, 0)) : -1;
  const int rank = wait_for_death(listener);
  if (rank < 0) return 0;
  char text[1024];
  const int length = last_line(text, sizeof text, rank, std::atoi(argv[3]), std::atoi(argv[4]));
  const int errors = handle >= 0 ? errors_of(starter) : -1;
  if (errors >= 0) {
    ::close(STDERR_FILENO);  // the launcher waits for its end
    pollfd ended{handle, POLLIN, 0};
    ::poll(&ended, 1, kStarter);
  }
  [[maybe_unused]] const ssize_t written =
      ::write(errors >= 0 ? errors : STDERR_FILENO, text, static_cast<std::size_t>(length));
  return 0;
}
