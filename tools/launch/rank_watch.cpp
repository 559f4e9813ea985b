#include "tools/launch/rank_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "tessera/base/device/module_loader.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"
#include "tools/launch/process.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

constexpr std::uint64_t kListener = std::uint64_t{1} << 32;
constexpr std::uint64_t kConnection = std::uint64_t{1} << 33;  // plus its descriptor; without either flag: a process

struct Address {
  sockaddr_un content = {};
  socklen_t length = 0;
};

/// A path, or an abstract name.
Address address_of(const std::string& name) {
  Address address;
  address.content.sun_family = AF_UNIX;
  const std::size_t first = name.starts_with('/') ? 0 : 1;
  const std::size_t length = std::min(name.size(), sizeof address.content.sun_path - 1);
  std::memcpy(address.content.sun_path + first, name.data(), length);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

const sockaddr* plain(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.content); }

std::string random_name() {
  const base::ProcessIdentity bits = base::this_process();
  std::ostringstream name;
  name << "tessera-ranks-" << std::hex << bits[0] << bits[1] << '-' << bits[2] << '-' << std::random_device{}();
  return name.str();
}

/// Status, as of waitpid, of a process that ended and is not reaped yet.
std::optional<int> status_of_ended(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  std::istringstream fields(line.substr(std::min(line.size(), line.rfind(')') + 2)));
  std::string field;
  constexpr int kFirst = 3;
  constexpr int kExitCode = 52;
  for (int i = kFirst; i <= kExitCode; ++i) fields >> field;
  return fields ? std::optional(std::atoi(field.c_str())) : std::nullopt;
}

// A signal handler can only access globals.
std::atomic<int> guards_connection{-1};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

/// SIGTERM: the launcher ends this rank because of another one.
void on_signal(int signal) {
  const char byte = signal == SIGABRT ? 'a' : 't';
  [[maybe_unused]] const ssize_t written = ::write(guards_connection.load(std::memory_order_relaxed), &byte, 1);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void spawn(std::vector<std::string> arguments) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);  // the launcher waits until they are closed
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  char* none[] = {nullptr};  // so that this process is not mistaken for the rank
  pid_t pid = -1;
  ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), none);
  ::posix_spawn_file_actions_destroy(&actions);
}

}  // namespace

RankWatch::RankWatch(int ranks, bool own_program)
    : ranks_(ranks),
      own_program_(own_program),
      name_(random_name()),
      listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      events_(::epoll_create1(EPOLL_CLOEXEC)) {
  const Address address = address_of(name_);
  if (!listener_ || !events_ || ::bind(listener_.get(), plain(address), address.length) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0)
    throw base::system_error("launcher: can't listen to its ranks");
  watch(listener_.get(), kListener);
}

void RankWatch::watch(int fd, std::uint64_t mark) {
  epoll_event wanted = {.events = EPOLLIN | EPOLLRDHUP | (mark == kListener ? 0U : static_cast<unsigned>(EPOLLET)),
                        .data = {.u64 = mark}};
  if (::epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &wanted) != 0)
    throw base::system_error("launcher: can't watch its ranks");
}

/// The kernel lists events in the order in which they happened, so the first process that ended comes first. A process
/// closes its connection before it has ended, and only its end can cause that of another.
void RankWatch::poll_events() {
  std::array<epoll_event, 64> events{};
  int count = 0;
  do {  // accepted connections add events
    count = ::epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), 0);
    accept_all();  // reports that a process sent before it ended
    for (int i = 0; i < count; ++i) {
      const std::uint64_t what = events[static_cast<std::size_t>(i)].data.u64;
      if (what == kListener) continue;
      if ((what & kConnection) != 0)
        on_hangup(static_cast<int>(what ^ kConnection));
      else
        on_end(static_cast<pid_t>(what));
    }
  } while (count > 0);
}

void RankWatch::accept_all() {
  constexpr int kAtOnce = 1000;  // another user may go on connecting
  for (int i = 0; i < kAtOnce; ++i) {
    base::UniqueFd connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection) return;
    ucred peer = {};
    socklen_t size = sizeof peer;
    if (::getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid())
      on_connection(std::move(connection), peer.pid);
  }
}

void RankWatch::on_connection(base::UniqueFd connection, pid_t pid) {
  Process& process = processes_[pid];
  const bool known = static_cast<bool>(process.handle);
  if (!known) {
    process.handle = base::UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    if (process.handle) watch(process.handle.get(), static_cast<std::uint64_t>(pid));
  }
  // Sent immediately after connecting; the deadline is for a process that is stopped in between.
  constexpr int kPatience = 100;
  pollfd entry{connection.get(), POLLIN, 0};
  char text[64];
  const ssize_t got = ::poll(&entry, 1, kPatience) == 1 ? ::recv(connection.get(), text, sizeof text, 0) : 0;
  if (got > 0) on_report(pid, std::string(text, static_cast<std::size_t>(got)));
  if (got > 0 && text[0] == 'b') {
    const int fd = connection.get();
    connections_[fd] = {std::move(connection), pid};
    watch(fd, kConnection | static_cast<std::uint64_t>(fd));
  }
  if (!process.handle) on_end(pid);  // it has already ended
}

void RankWatch::on_hangup(int fd) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  char text[64];
  const ssize_t got = ::recv(fd, text, sizeof text, MSG_DONTWAIT);
  const pid_t pid = found->second.second;
  if (got > 0) on_report(pid, std::string(text, static_cast<std::size_t>(got)));
  if (got > 0 || (got < 0 && errno == EAGAIN)) return;
  connections_.erase(found);
  if (const Process& process = processes_[pid]; !process.code) on_lost(process);
}

void RankWatch::on_report(pid_t pid, const std::string& text) {
  std::istringstream fields(text);
  std::string what;
  int number = -1;
  while (fields >> what >> number) {  // a rank that fails at once has sent both by now
    if (what == "start" && number >= 0 && number < ranks_) processes_[pid].rank = number;
    if (what == "end") processes_[pid].code = number;
    failed_first_ |= what == "end" && number != 0 && !lost_;
  }
}

void RankWatch::on_end(pid_t pid) {
  Process& process = processes_[pid];
  if (std::exchange(process.ended, true)) return;  // on a second event its status may be gone
  process.status = status_of_ended(pid);
  if (process.code) return;
  if (lost_ && lost_->rank == process.rank) lost_->status = process.status;
  if (process.status ? *process.status != 0 : own_program_) on_lost(process);
}

std::optional<RankWatch::Lost> RankWatch::named_in(const std::string& text) const {
  for (const auto& [pid, process] : processes_)
    if (process.ended && process.rank >= 0 && text.find("(pid=" + std::to_string(pid) + " ") != std::string::npos)
      return Lost{.rank = process.rank, .status = process.status};
  return std::nullopt;
}

bool RankWatch::any_started() const {
  return std::ranges::any_of(processes_, [](const auto& one) { return one.second.rank >= 0; });
}

bool RankWatch::rest_is_stopped() const {
  int ended = 0;
  int stopped = 0;
  for (const auto& [pid, process] : processes_) {
    if (process.rank < 0) continue;
    if (process.ended)
      ++ended;
    else if (is_stopped(pid))
      ++stopped;
  }
  return stopped > 0 && ended + stopped == ranks_;
}

bool RankWatch::all_done() const {
  std::size_t done = 0;
  for (const auto& [pid, process] : processes_)
    if (process.rank >= 0 && process.code == 0) ++done;
  return done == static_cast<std::size_t>(ranks_);
}

LauncherConnection::LauncherConnection(const std::string& name, std::string_view first) {
  const Address address = address_of(name);
  constexpr int kHigh = 512;
  for (base::UniqueFd& socket : sockets_) {
    socket = base::UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (&socket != sockets_.data())
      if (base::UniqueFd high(::fcntl(socket.get(), F_DUPFD_CLOEXEC, kHigh)); high) socket = std::move(high);
    if (!socket || ::connect(socket.get(), plain(address), address.length) != 0 ||
        ::send(socket.get(), first.data(), first.size(), MSG_NOSIGNAL) < 0)
      socket.reset();
  }
}

void LauncherConnection::send(std::string_view text) const {
  for (const base::UniqueFd& socket : sockets_)
    if (socket) [[maybe_unused]]
      const ssize_t sent = ::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
}

LauncherConnection connect_to_launcher() {
  const std::optional<std::string> name = launch_socket();
  return name ? LauncherConnection(*name, "begin 0\n") : LauncherConnection();
}

LauncherConnection connect_to_guard(const comm::Launch& launch) {
  LauncherConnection connection;
  if (launch.size == 1 || launch.launcher == "tessera") return connection;
  std::string name;
  try {  // a path, not an abstract name, which another user could take first
    const std::size_t job = std::hash<std::string>{}(launch.job + "/" + comm::host_identity());
    name = comm::private_directory() + "/guard-" + std::to_string(job);
  } catch (const base::Error&) {  // the rank also runs without a guard
    return connection;
  }
  const bool speaks_last = launch.launcher == "openmpi";
  // Launchers number the ranks of a host consecutively unless configured otherwise; in that case the guard lists too
  // many ranks.
  spawn({base::module_directory() + "/rank-guard", name, std::to_string(speaks_last ? ::getppid() : 0),
         std::to_string(launch.rank - launch.local_rank), std::to_string(launch.local_size)});
  // Blocks SIGTERM until it can be distinguished from a death.
  sigset_t terminated;
  sigset_t before;
  ::sigemptyset(&terminated);
  ::sigaddset(&terminated, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &terminated, &before);
  constexpr int kAttempts = 2000;  // 2 s on a busy machine; the rank also runs without a guard
  for (int i = 0; i < kAttempts && !connection.connected(); ++i) {
    connection = LauncherConnection(name, std::to_string(launch.rank) + "\n");
    if (!connection.connected()) ::usleep(1000);
  }
  if (connection.connected()) {
    guards_connection = connection.last();
    struct sigaction action {};
    action.sa_handler = on_signal;
    for (const int signal : {SIGTERM, SIGABRT}) ::sigaction(signal, &action, nullptr);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return connection;
}

}  // namespace tessera::tools
