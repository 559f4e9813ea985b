#include "tools/launch/host_connection.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "tessera/base/env.h"
#include "tools/cli/output.h"

namespace tessera::tools {

HostConnection::HostConnection(std::string host, ProcessSpec command, Pipe input)
    : host_(std::move(host)), lifeline_(std::move(input.write_end)), input_(lifeline_.get()) {
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  command.input = input.read_end.get();
  command.output = output.write_end.get();
  command.errors = errors.write_end.get();
  pid_ = start_process(command);
  output_ = std::move(output.read_end);
  errors_ = std::move(errors.read_end);
  for (const int fd : {output_.get(), errors_.get()}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
}

HostConnection::~HostConnection() {
  if (!running_) return;
  kill();
  ::waitpid(pid_, nullptr, 0);
}

void HostConnection::kill() const {
  if (running_) ::kill(pid_, SIGKILL);
}

void HostConnection::reap() {
  if (!running_ || ::waitpid(pid_, &status_, WNOHANG) != pid_) return;
  running_ = false;
  heard_ = std::chrono::steady_clock::now();
  hang_up();
}

bool HostConnection::ended() {
  if (running_) return false;
  const bool unread = [&] {
    pollfd streams[] = {{output_.get(), POLLIN, 0}, {errors_.get(), POLLIN, 0}};
    return ::poll(streams, 2, 0) > 0;  // a reader of this program's output may be slow
  }();
  if (!unread && std::chrono::steady_clock::now() - heard_ >= kToDrain) {
    output_.reset();
    errors_.reset();
  }
  return !output_ && !errors_;
}

/// The user's own options come first, and ssh uses the first value of each.
std::vector<std::string> far_side_command(std::vector<std::string> ssh, const std::string& host,
                                          const std::string& tessera, const std::string& subcommand) {
  for (const char* const option :
       {"BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3", "ControlMaster=no",
        "ControlPath=none", "ClearAllForwardings=yes", "ForwardX11=no", "ForwardAgent=no", "LogLevel=ERROR"})
    ssh.insert(ssh.end(), {"-o", option});
  ssh.insert(ssh.end(), {"-T", "-e", "none", "--", host,
                         "exec '" + replaced(tessera, '\'', "'\\''") + "' " + subcommand + " --as-host"});
  return ssh;
}

Captured capture(const ProcessSpec& process, std::chrono::seconds patience) {
  Captured result;
  HostConnection running("", process);
  running.hang_up();
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (!(result.ended = running.ended()) && std::chrono::steady_clock::now() < deadline) {
    pollfd streams[] = {{running.output(), POLLIN, 0}, {running.errors(), POLLIN, 0}};
    ::poll(streams, 2, 50);
    if (streams[0].revents != 0) running.read_output([&](std::string_view line) { result.output.emplace_back(line); });
    if (streams[1].revents != 0) running.read_errors([&](std::string_view line) { result.last_error = line; });
    running.reap();
  }
  constexpr std::string_view kOurs = "tessera: ";
  if (result.last_error.starts_with(kOurs)) result.last_error.erase(0, kOurs.size());
  result.status = running.status();
  return result;
}

std::string name_in_network(std::vector<std::string> ssh, const std::string& host) {
  ssh.insert(ssh.end(), {"-G", "--", host});
  const Captured query =
      capture({.command = std::move(ssh), .environment = base::environment_with({})}, std::chrono::seconds(5));
  for (const std::string& line : query.output)
    if (line.starts_with("hostname ")) return line.substr(9);
  return host.substr(host.find('@') + 1);
}

}  // namespace tessera::tools
