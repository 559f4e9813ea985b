#include "tools/launch/process.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"

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

bool is_stopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t state = line.rfind(')') + 2;  // after the program's name, which may contain anything
  return state < line.size() && line[state] == 'T';
}

namespace {

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

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
  if (!plan.reads_input) {
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

}  // namespace

pid_t start_process(const ProcessSpec& plan) {
  Prepared prepared{pointers(plan.command), pointers(plan.environment), {}, ::getpid()};
  CPU_ZERO(&prepared.cores);
  for (const int core : plan.cores) CPU_SET(core, &prepared.cores);
  Pipe report = make_pipe();  // closes itself when exec succeeds
  const pid_t pid = ::fork();
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

namespace {

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

OrphanReaper::OrphanReaper(const std::string& marker) {
  Pipe pipe = make_pipe();
  pid_ = ::fork();
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

}  // namespace tessera::tools
