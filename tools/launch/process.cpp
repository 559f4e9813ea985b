#include "tools/launch/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"

namespace tessera::tools {

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw base::system_error("launcher: can't create a pipe");
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

void kill_children(pid_t except) {
  const std::string path = "/proc/self/task/" + std::to_string(::getpid()) + "/children";
  for (int round = 0; round < 100; ++round) {
    std::ifstream children(path);
    bool left = false;
    for (pid_t pid = 0; children >> pid;) {
      if (pid == except) continue;
      left = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    if (!left) return;
  }
}

namespace {

namespace fs = std::filesystem;

/// The letter of a process's state; nothing if it is gone.
std::optional<char> state_of(const fs::path& process) {
  std::ifstream file(process / "stat");
  std::string line;
  std::getline(file, line);
  const std::size_t state = line.rfind(')') + 2;  // after the program's name, which may contain anything
  return state < line.size() ? std::optional(line[state]) : std::nullopt;
}

constexpr std::string_view kFolder = "/dev/shm/";
constexpr std::array<std::string_view, 4> kSegments = {"vader_segment.", "sm_segment.", "mpich_shar_tmp",
                                                       "ucx_shm_posix_"};

bool is_ours(const fs::path& path) {
  struct stat status = {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
}

std::set<std::string> segments() {
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(kFolder)) {
    const std::string name = entry.path().filename();
    for (const std::string_view prefix : kSegments)
      if (name.starts_with(prefix) && is_ours(entry.path())) found.insert(entry.path());
  }
  return found;
}

/// True if the process is gone, or has ended and is not reaped: it uses nothing any more.
bool has_ended(const fs::path& process) {
  const std::optional<char> state = state_of(process);
  return state ? *state == 'Z' : !fs::exists(process);
}

/// Removes from `unused` what this process has open or mapped. Reads descriptors first: a file that is closed in
/// between is mapped by then. False: the process is alive but can't be inspected.
bool remove_used(const fs::path& process, std::set<std::string>& unused) {
  std::error_code error;
  for (auto file = fs::directory_iterator(process / "fd", error); !error && file != fs::directory_iterator();
       file.increment(error)) {
    std::error_code gone;
    unused.erase(fs::read_symlink(file->path(), gone));
  }
  if (error) return has_ended(process);
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line);)
    if (const std::size_t at = line.find(kFolder); at != std::string::npos) unused.erase(line.substr(at));
  return maps.eof() || has_ended(process);
}

/// All processes are visible from the initial pid namespace.
bool sees_all_processes() {
  struct stat status = {};
  constexpr ino_t kFirst = 0xEFFFFFFC;  // the kernel's PROC_PID_INIT_INO
  return ::stat("/proc/self/ns/pid", &status) == 0 && status.st_ino == kFirst;
}

void remove_segments() {
  if (!sees_all_processes()) return;
  std::set<std::string> unused = segments();
  if (unused.empty()) return;
  for (const auto& process : fs::directory_iterator("/proc")) {
    if (std::atoi(process.path().filename().c_str()) <= 1) continue;  // init is not a rank and may not be inspectable
    struct stat status = {};
    if (::stat(process.path().c_str(), &status) != 0 || status.st_uid != ::geteuid()) continue;
    if (!remove_used(process.path(), unused)) return;
  }
  for (const std::string& path : unused) ::unlink(path.c_str());
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

// Children are made by _Fork(), without the handlers of libraries: OpenBLAS's waits for its threads, which wait for
// ever where the address space is limited.
struct Prepared {  // all that the child needs, prepared before the fork: after it only system calls are safe
  std::vector<char*> arguments;
  std::vector<char*> environment;
  cpu_set_t cores;
  pid_t parent;
};

[[noreturn]] void run_child(const ProcessSpec& plan, const Prepared& prepared, int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != prepared.parent) ::_exit(127);  // the parent died before the call above
  sigset_t none;
  ::sigemptyset(&none);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE}) ::signal(signal, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (plan.own_session) ::setsid();
  if (plan.input >= 0) {
    ::dup2(plan.input, STDIN_FILENO);
  } else if (!plan.reads_input) {
    const int null = ::open("/dev/null", O_RDONLY);
    ::dup2(null, STDIN_FILENO);
    ::close(null);
  }
  if (plan.output >= 0) ::dup2(plan.output, STDOUT_FILENO);
  if (plan.errors >= 0) ::dup2(plan.errors, STDERR_FILENO);
  if (!plan.cores.empty()) ::sched_setaffinity(0, sizeof prepared.cores, &prepared.cores);
  ::execvpe(prepared.arguments[0], prepared.arguments.data(), prepared.environment.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t written = ::write(report, &error, sizeof error);
  ::_exit(127);
}

/// True if NAME=value is one of the process's initial variables.
bool has_marker(pid_t pid, const char* marker, std::size_t length) {
  char path[64];
  char* end = path + sizeof path;  // no stdio: this runs in a forked child
  char* digit = end;
  constexpr char kTail[] = "/environ";
  digit -= sizeof kTail;
  std::memcpy(digit, kTail, sizeof kTail);
  for (pid_t rest = pid; rest > 0; rest /= 10) *--digit = static_cast<char>('0' + rest % 10);
  constexpr char kHead[] = "/proc/";
  digit -= sizeof kHead - 1;
  std::memcpy(digit, kHead, sizeof kHead - 1);
  const int file = ::open(digit, O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  static char text[1 << 20];
  std::size_t size = 0;
  for (ssize_t got = 1; got > 0 && size < sizeof text;) {
    got = ::read(file, text + size, sizeof text - size);
    if (got > 0) size += static_cast<std::size_t>(got);
  }
  ::close(file);
  return ::memmem(text, size, marker, length) != nullptr;
}

int kill_marked(const char* marker, std::size_t length) {
  DIR* directory = ::opendir("/proc");
  if (directory == nullptr) return 0;
  int killed = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const auto pid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (pid <= 1 || pid == ::getpid() || !has_marker(pid, marker, length)) continue;
    if (::kill(pid, SIGKILL) == 0) ++killed;
  }
  ::closedir(directory);
  return killed;
}

[[noreturn]] void guard(int lifeline, const std::string& marker) {
  ::setsid();  // detached from the terminal's Ctrl-C
  ::prctl(PR_SET_NAME, "tessera-guard");
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::signal(signal, SIG_IGN);
  const int null = ::open("/dev/null", O_RDWR);  // an open terminal or pipe would block its reader
  for (int stream = 0; stream < 3; ++stream) ::dup2(null, stream);
  char byte = 0;
  ssize_t got = 0;
  do got = ::read(lifeline, &byte, 1);
  while (got < 0 && errno == EINTR);
  if (got == 1) ::_exit(0);  // the launcher ended normally
  for (int round = 0; round < 100 && kill_marked(marker.data(), marker.size()) > 0; ++round) ::usleep(20'000);
  ::_exit(0);
}

}  // namespace

bool is_stopped(pid_t pid) { return state_of("/proc/" + std::to_string(pid)) == 'T'; }

void remove_leftovers() noexcept {
  comm::remove_dead_rendezvous_files();
  try {
    remove_segments();
  } catch (const std::exception&) {  // they remain until the next start
  }
}

pid_t start_process(const ProcessSpec& plan) {
  Prepared prepared{pointers(plan.command), pointers(plan.environment), {}, ::getpid()};
  CPU_ZERO(&prepared.cores);
  for (const int core : plan.cores) CPU_SET(core, &prepared.cores);
  Pipe report = make_pipe();  // closes itself when exec succeeds
  const pid_t pid = ::_Fork();
  if (pid < 0) throw base::system_error("launcher: can't start '" + plan.command[0] + "'");
  if (pid == 0) run_child(plan, prepared, report.write_end.get());
  report.write_end.reset();
  int error = 0;
  ssize_t got = 0;
  do got = ::read(report.read_end.get(), &error, sizeof error);
  while (got < 0 && errno == EINTR);
  if (got != sizeof error) return pid;
  ::waitpid(pid, nullptr, 0);
  const std::string text = "can't start '" + plan.command[0] + "': " + std::generic_category().message(error);
  if (error == ENOENT || error == EACCES || error == ENOEXEC || error == ENOTDIR || error == EISDIR)
    throw base::InvalidUsage(text + "; give a program's path or a name in PATH");
  throw base::SystemError(text);
}

OrphanReaper::OrphanReaper(const std::string& marker) {
  Pipe pipe = make_pipe();
  pid_ = ::_Fork();
  if (pid_ < 0) throw base::system_error("launcher: can't start its guardian");
  if (pid_ == 0) {
    pipe.write_end.reset();
    guard(pipe.read_end.get(), marker);
  }
  lifeline_ = std::move(pipe.write_end);
}

OrphanReaper::~OrphanReaper() {
  const char byte = 1;
  [[maybe_unused]] const ssize_t written = ::write(lifeline_.get(), &byte, 1);
  lifeline_.reset();
  ::waitpid(pid_, nullptr, 0);
}

namespace {

// A signal handler can only access globals.
std::atomic<int> signal_target{-1};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

void write_to_pipe(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t written = ::write(signal_target.load(std::memory_order_relaxed), &byte, 1);
  errno = saved;
}

/// Signal-safe: no stdio, no allocation.
void on_early_signal(int signal) {
  char text[64] = "tessera: stopped by signal ";
  std::size_t length = std::strlen(text);
  if (signal >= 10) text[length++] = static_cast<char>('0' + signal / 10);
  text[length++] = static_cast<char>('0' + signal % 10);
  for (const char* part : {" (", signal_name(signal), ")\n"})
    for (; *part != '\0'; ++part) text[length++] = *part;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, length);
  ::_exit(1);
}

}  // namespace

void say_what_stops_us() {
  struct sigaction action {};
  action.sa_handler = on_early_signal;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction former {};
    if (::sigaction(signal, nullptr, &former) == 0 && former.sa_handler == SIG_DFL)
      ::sigaction(signal, &action, nullptr);
  }
}

SignalPipe::SignalPipe() : pipe_(make_pipe()) {
  for (const int end : {pipe_.read_end.get(), pipe_.write_end.get()}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  signal_target = pipe_.write_end.get();
  struct sigaction action {};
  action.sa_handler = write_to_pipe;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &former_[i]);
}

SignalPipe::~SignalPipe() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &former_[i], nullptr);
  signal_target = -1;
}

int SignalPipe::next_signal() {
  unsigned char bytes[64];
  int last = 0;
  for (ssize_t got = 0; (got = ::read(pipe_.read_end.get(), bytes, sizeof bytes)) > 0;)
    for (ssize_t i = 0; i < got; ++i)
      if (bytes[i] != SIGCHLD) last = bytes[i];
  return last;
}

const char* signal_name(int signal) {
  static constexpr std::pair<int, const char*> kNames[] = {
      {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGHUP, "SIGHUP"},
      {SIGILL, "SIGILL"},   {SIGINT, "SIGINT"},   {SIGKILL, "SIGKILL"}, {SIGPIPE, "SIGPIPE"},
      {SIGQUIT, "SIGQUIT"}, {SIGSEGV, "SIGSEGV"}, {SIGTERM, "SIGTERM"}};
  for (const auto& [number, name] : kNames)
    if (number == signal) return name;
  return "signal";
}

}  // namespace tessera::tools
