// Processes that the tests start, communicate with and end.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm_test {

/// One rank, which ends with its object.
class Process {
 public:
  Process(std::string program, std::vector<std::string> settings, const std::string& mode) {
    const auto [read_end, in] = make_pipe();
    const auto [out, write_end] = make_pipe();
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, read_end, STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, write_end, STDOUT_FILENO);
    std::string argument = mode;
    char* arguments[] = {program.data(), argument.data(), nullptr};
    std::vector<char*> environment;
    for (std::string& setting : settings) environment.push_back(setting.data());
    environment.push_back(nullptr);
    const int failed = ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environment.data());
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(read_end);
    ::close(write_end);
    in_ = comm::UniqueFd(in);
    out_ = comm::UniqueFd(out);
    if (failed != 0) throw base::system_error("posix_spawn " + program, failed);
    started().insert(pid_);
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), in_(std::move(other.in_)), out_(std::move(other.out_)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(pid_, other.pid_);
    std::swap(in_, other.in_);
    std::swap(out_, other.out_);
    return *this;
  }
  ~Process() {
    if (pid_ < 0) return;
    kill(SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  /// The pids of all processes that this test program has started.
  static std::set<pid_t>& started() {
    static std::set<pid_t> pids;
    return pids;
  }

  void kill(int signal) const { ::kill(pid_, signal); }
  pid_t pid() const { return pid_; }

  void end_input() { in_.reset(); }
  /// Writes a line to its standard input.
  void say(const std::string& text) const {
    const std::string all = text + "\n";
    if (::write(in_.get(), all.data(), all.size()) != static_cast<ssize_t>(all.size()))
      throw base::system_error("write to a rank");
  }

  /// Reads the next line; "" at the end or after `time`.
  std::string line(std::chrono::milliseconds time = std::chrono::seconds(20)) {
    const auto until = std::chrono::steady_clock::now() + time;
    std::string text;
    while (std::chrono::steady_clock::now() < until) {
      pollfd entry{out_.get(), POLLIN, 0};
      if (::poll(&entry, 1, 50) <= 0) continue;
      char c = 0;
      if (::read(out_.get(), &c, 1) != 1 || c == '\n') break;
      text += c;
    }
    return text;
  }

  /// The exit code; -1 if a signal killed the process or it is still running after `time`.
  int exit_code(std::chrono::milliseconds time = std::chrono::seconds(10)) {
    const auto until = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < until) {
      int status = 0;
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      ::usleep(2000);
    }
    return -1;
  }

 private:
  static std::pair<int, int> make_pipe() {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) throw base::system_error("pipe");
    return {ends[0], ends[1]};
  }

  pid_t pid_ = -1;
  comm::UniqueFd in_;
  comm::UniqueFd out_;
};

}  // namespace tessera::comm_test
