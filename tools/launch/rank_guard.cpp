// rank-guard PATH STARTER FIRST COUNT: one process per host beside ranks that the user's own launcher has started. If a
// rank dies without a message, the guard prints one in its place: no other process there knows which rank it was.
//
// Each rank starts a guard; the first that acquires PATH, a Unix socket in a directory of this user's, stays, the
// others exit at once. The ranks connect to it, send their rank, and report their end. The first connection that closes
// without this report belongs to the dead rank; the launcher kills the others. COUNT ranks from FIRST on are on this
// host; until all of them have connected, the dead rank may be one of the missing. STARTER is a launcher (0: none) that
// prints much on standard error at its end: then the guard waits for its end and prints last.
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>

namespace {

constexpr int kFirstRank = 10'000;  // ms until the first rank connects
constexpr int kStarter = 5'000;     // until the launcher has ended
constexpr int kTurn = 2;            // for the cause of an abort
constexpr int kGrace = 2'000;       // for the others to detect the failure themselves
constexpr int kLook = 50;           // ... until it looks whether they are stopped
constexpr int kTerminated = 1'000;  // between SIGTERM and SIGKILL
constexpr int kForEver = -1;
constexpr int kMaxRanks = 4096;  // descriptors; more ranks on one host are not guarded

/// The names of the socket and of the file that the process with the socket has locked: a socket outlives its process.
struct Names {
  explicit Names(const char* path) {
    std::snprintf(socket.sun_path, sizeof socket.sun_path, "%s", path);
    std::snprintf(lock, sizeof lock, "%s.lock", path);
    const char* const end = std::strrchr(path, '/');
    std::snprintf(directory, sizeof directory, "%.*s", static_cast<int>(end == nullptr ? 0 : end - path), path);
  }
  sockaddr_un socket = {.sun_family = AF_UNIX, .sun_path = {}};
  char lock[sizeof socket.sun_path + 8];
  char directory[sizeof socket.sun_path];
};

/// Another run may have removed the directory when it was empty. It must be one that only this user can enter.
int open_lock(const Names& names) {
  constexpr int kAttempts = 3;
  for (int i = 0; i < kAttempts; ++i) {
    ::mkdir(names.directory, 0700);
    struct stat status = {};
    if (::lstat(names.directory, &status) != 0) continue;
    if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) return -1;
    const int lock = ::open(names.lock, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (lock >= 0) return lock;
  }
  return -1;
}

int listen_at(const Names& names) {
  const int lock = open_lock(names);
  if (lock < 0 || ::flock(lock, LOCK_EX | LOCK_NB) != 0) return -1;
  ::unlink(names.socket.sun_path);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool ours = fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&names.socket), sizeof names.socket) == 0;
  return ours && ::listen(fd, SOMAXCONN) == 0 ? fd : -1;
}

void remove(const Names& names) {
  ::unlink(names.socket.sun_path);
  ::unlink(names.lock);
  ::rmdir(names.directory);  // if it is empty
}

struct ProcessState {
  bool dying = false;    ///< has begun to end, which takes it milliseconds if it has much memory, or has ended
  bool stopped = false;  ///< by a signal
};

/// The default if the state can't be read.
ProcessState state_of(pid_t pid) {
  constexpr unsigned long kExiting = 0x4;  // PF_EXITING in the kernel's include/linux/sched.h
  char path[32];
  char text[512] = {};
  std::snprintf(path, sizeof path, "/proc/%d/stat", static_cast<int>(pid));
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {.dying = errno == ENOENT && ::access("/proc/self/stat", F_OK) == 0};  // gone, not hidden
  const ssize_t got = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (got <= 0) return {.dying = true};  // gone since
  const char* const name_end = std::strrchr(text, ')');
  char letter = 0;
  unsigned long flags = 0;
  if (name_end == nullptr || std::sscanf(name_end, ") %c %*d %*d %*d %*d %*d %lu", &letter, &flags) != 2) return {};
  return {.dying = (flags & kExiting) != 0, .stopped = letter == 'T'};
}

class Guard {
 public:
  explicit Guard(int listener) : listener_(listener) { watch(listener); }

  /// Waits until a rank dies; returns its rank. -1: no rank died; all have ended, or one has failed and reported why.
  int wait_for_death() {
    int suspect = -1;
    while (!begun_ || open_ > 0) {
      int rank = -1;
      switch (next(suspect >= 0 ? kTurn : begun_ ? kForEver : kFirstRank, rank)) {
        case Report::late:
          return suspect;
        case Report::failure:
          return -1;
        case Report::end:
          if (!ranks_[rank].aborts) return rank;
          if (suspect < 0) suspect = rank;
          break;
        case Report::nothing:
          // Reading the memory of a dead rank aborts the reader, often before the dead rank's connection is closed.
          if (rank < 0 || !ranks_[rank].aborts) break;
          if (const int cause = dying_rank(); cause >= 0) return cause;
          break;
      }
    }
    return suspect;
  }

  /// Waits for the remaining ranks, also for those of the `all` from `first` on that have yet to connect, then kills
  /// them. A rank that comes after a failure was reported is no death: the launcher ends it before it can say anything.
  void end_others(int first, int all) {
    const auto missing = [&] {
      for (int rank = first; rank < first + all && rank < kMaxRanks; ++rank)
        if (!came(rank)) return true;
      return false;
    };
    for (int waited = 0; waited < kGrace && !(open_ > 0 && rest_is_stopped()); waited += kLook) {
      if (open_ == 0 && !missing()) return;
      int rank = -1;
      open_ > 0 ? static_cast<void>(wait_until_gone(kLook)) : static_cast<void>(next(kLook, rank));
    }
    if (open_ == 0) return;
    signal_all(SIGTERM);
    if (!wait_until_gone(kTerminated)) signal_all(SIGKILL);
  }

  bool came(int rank) const { return ranks_[rank].came; }

 private:
  struct Rank {
    bool came = false;
    bool ends = false;    ///< by itself, or because the launcher ends it
    bool aborts = false;  ///< perhaps because of another rank that died just before
  };
  struct Connection {
    bool open = false;
    int rank = -1;  ///< not received yet
    pid_t pid = 0;  ///< alive while the connection is open
  };
  enum class Report { nothing, late, end, failure };

  bool watch(int fd) const {
    epoll_event wanted = {.events = EPOLLIN | EPOLLRDHUP, .data = {.fd = fd}};
    return ::epoll_ctl(events_, EPOLL_CTL_ADD, fd, &wanted) == 0;
  }

  /// Handles one event. Events are in the order in which they happened.
  Report next(int patience, int& rank) {
    epoll_event event = {};
    const int count = ::epoll_wait(events_, &event, 1, patience);
    if (count == 0) return Report::late;
    if (count < 0) return Report::nothing;
    const int fd = event.data.fd;
    if (fd == listener_) {
      accept_one();
      return Report::nothing;
    }
    char text[64] = {};
    const ssize_t got = ::recv(fd, text, sizeof text - 1, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Report::nothing;
    Connection& one = connections_[fd];
    if (const int said = std::atoi(text); got > 0 && one.rank < 0 && said >= 0 && said < kMaxRanks) one.rank = said;
    if (got <= 0) {
      ::close(fd);
      one.open = false;
      --open_;
    }
    if (one.rank < 0) return Report::nothing;
    rank = one.rank;
    Rank& state = ranks_[rank];
    state.came = true;
    state.ends |= std::strpbrk(text, "eft") != nullptr;
    state.aborts |= std::strchr(text, 'a') != nullptr;
    if (std::strchr(text, 'f') != nullptr) return Report::failure;
    return got > 0 || state.ends ? Report::nothing : Report::end;
  }

  void accept_one() {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    ucred peer = {};
    socklen_t size = sizeof peer;
    const bool known = ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
    if (fd >= kMaxRanks || !known || !watch(fd)) return static_cast<void>(::close(fd));
    connections_[fd] = {.open = true, .rank = -1, .pid = peer.pid};
    ++open_;
    begun_ = true;
  }

  /// A connected rank whose process is ending, but not because it aborts. -1: none.
  int dying_rank() const {
    for (const Connection& one : connections_)
      if (one.open && one.rank >= 0 && one.pid > 0 && !ranks_[one.rank].aborts && !ranks_[one.rank].ends &&
          state_of(one.pid).dying)
        return one.rank;
    return -1;
  }

  void signal_all(int signal) const {
    for (const Connection& one : connections_) {
      if (!one.open) continue;
      ::kill(one.pid, signal);
      ::kill(one.pid, SIGCONT);
    }
  }

  /// They can detect and report nothing.
  bool rest_is_stopped() const {
    for (const Connection& one : connections_)
      if (one.open && !state_of(one.pid).stopped) return false;
    return true;
  }

  bool wait_until_gone(int patience) {
    timespec now = {};
    const auto milliseconds = [&] {
      ::clock_gettime(CLOCK_MONOTONIC, &now);
      return now.tv_sec * 1000 + now.tv_nsec / 1'000'000;
    };
    const auto until = milliseconds() + patience;
    int rank = -1;
    for (auto left = until - milliseconds(); open_ > 0 && left > 0; left = until - milliseconds())
      next(static_cast<int>(left), rank);
    return open_ == 0;
  }

  const int listener_;
  const int events_ = ::epoll_create1(EPOLL_CLOEXEC);
  Rank ranks_[kMaxRanks];
  Connection connections_[kMaxRanks];
  int open_ = 0;
  bool begun_ = false;
};

/// The launcher's standard error; -1: unknown.
int errors_of(int process) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/2", process);
  return ::open(path, O_WRONLY | O_APPEND | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
}

/// The line for a rank that died before others of `all` had connected.
int last_line(char* text, std::size_t size, int rank, const Guard& guard, int first, int all) {
  char missing[512] = {};
  std::size_t length = 0;
  for (int other = first; other < first + all && other < kMaxRanks && length + 16 < sizeof missing; ++other)
    if (!guard.came(other))
      length += static_cast<std::size_t>(
          std::snprintf(missing + length, sizeof missing - length, "%srank %d", length > 0 ? " or " : "", other));
  if (length == 0) return std::snprintf(text, size, "tessera: rank %d died without an error message\n", rank);
  return std::snprintf(text, size, "tessera: %s died before it began, or rank %d without an error message\n", missing,
                       rank);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  ::umask(077);  // the ranks' may take rights from the owner, too
  const Names names(argv[1]);
  const int listener = listen_at(names);
  if (listener < 0) return 0;
  ::setsid();  // detached from signals to the ranks' process group
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  const int starter = std::atoi(argv[2]);
  const int handle = starter > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, starter, 0)) : -1;
  static Guard guard(listener);
  const int rank = guard.wait_for_death();
  char text[1024];
  const int first = std::atoi(argv[3]);
  const int all = std::atoi(argv[4]);
  const int length = rank < 0 ? 0 : last_line(text, sizeof text, rank, guard, first, all);
  const int errors = handle >= 0 ? errors_of(starter) : -1;
  const auto say = [&](int where) {
    [[maybe_unused]] const ssize_t written = ::write(where, text, static_cast<std::size_t>(length));
  };
  if (errors < 0) say(STDERR_FILENO);
  ::close(STDERR_FILENO);  // the launcher waits until it is closed
  guard.end_others(first, length > 0 ? 0 : all);
  remove(names);
  if (errors < 0 || length == 0) return 0;
  pollfd ended{handle, POLLIN, 0};
  ::poll(&ended, 1, kStarter);
  say(errors);
  return 0;
}
