#include "tools/launch/host_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"
#include "tools/cli/output.h"
#include "tools/launch/launcher.h"
#include "tools/version.h"

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

void HostControl::read(int patience) {
  pollfd entry{STDIN_FILENO, POLLIN, 0};
  if (ended_ || ::poll(&entry, 1, patience) != 1) return;
  char bytes[4096];
  const ssize_t got = ::read(STDIN_FILENO, bytes, sizeof bytes);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  heard_ = std::chrono::steady_clock::now();
  if (got <= 0)
    ended_ = true;
  else
    splitter_.feed({bytes, static_cast<std::size_t>(got)},
                   [this](std::string_view line) { lines_.emplace_back(line); });
}

std::optional<std::string> HostControl::next_line(std::chrono::seconds silence) {
  while (!lines_.empty() || (!ended_ && std::chrono::steady_clock::now() - heard_ < silence)) {
    if (lines_.empty()) read(100);
    if (!lines_.empty() && lines_.front() == "alive") lines_.pop_front();
    if (lines_.empty()) continue;
    std::string line = std::move(lines_.front());
    lines_.pop_front();
    return line;
  }
  return std::nullopt;
}

int HostControl::next() {
  if (lines_.empty()) read(0);
  while (!lines_.empty()) {
    const std::string line = std::move(lines_.front());
    lines_.pop_front();
    if (line == "fail") return kFail;
    if (line.starts_with("signal ")) return std::atoi(line.c_str() + 7);
  }
  if (reported_ || (!ended_ && std::chrono::steady_clock::now() - heard_ < kHostSilence)) return 0;
  reported_ = true;
  return SIGHUP;
}

namespace {

using Json = nlohmann::ordered_json;
using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses addresses_of(const std::string& host, const char* port) {
  addrinfo* found = nullptr;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  const int error = ::getaddrinfo(host.c_str(), port, &hints, &found);
  if (error != 0)
    throw base::InvalidUsage("can't resolve the name of host '" + host + "': " + ::gai_strerror(error) +
                             "; enter it in /etc/hosts, or give --address, the address of the first host");
  return {found, &::freeaddrinfo};
}

/// The address from which this host sends to another one.
std::string address_towards(const std::string& host) {
  const Addresses found = addresses_of(host, "9");
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    const base::UniqueFd probe(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (probe && ::connect(probe.get(), one->ai_addr, one->ai_addrlen) == 0) return comm::own_address(probe.get());
  }
  throw base::InvalidUsage("no route to host '" + host + "': " + base::system_error("connect").what() +
                           "; give --address, the address of the first host");
}

/// A port that is free now, below those that the system gives to outgoing connections.
std::uint16_t free_port() {
  std::random_device random;
  for (int attempt = 0; attempt < 100; ++attempt) {
    const auto port = static_cast<std::uint16_t>(20'000 + random() % 12'000);
    const std::string text = std::to_string(port);
    addrinfo hints = {};
    hints.ai_flags = AI_PASSIVE;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (::getaddrinfo(nullptr, text.c_str(), &hints, &found) != 0) break;
    const Addresses all(found, &::freeaddrinfo);
    bool free = true;
    for (const addrinfo* one = all.get(); one != nullptr; one = one->ai_next) {
      const base::UniqueFd socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      free &= !socket || ::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0 || errno == EADDRNOTAVAIL;
      if (one->ai_family == AF_INET6 || !free) break;  // which includes IPv4
    }
    if (free) return port;
  }
  throw base::SystemError("can't find a free port for the rendezvous; give --address ADDRESS:PORT");
}

/// The rendezvous' address on this host, the first: as given, or by the route to another host.
std::string master_of(const Json& order) {
  std::string address = order.at("address");
  if (address.empty()) address = address_towards(order.at("peer"));
  const std::size_t colon = address.rfind(':');
  if (colon != std::string::npos && (address[colon - 1] == ']' || address.find(':') == colon)) {
    base::parse_integer(address.substr(colon + 1), "--address " + address + ": port", 1, 65535);
    return address;
  }
  if (colon != std::string::npos && address.front() != '[') address = "[" + address + "]";
  return address + ":" + std::to_string(free_port());
}

void say(const std::string& line) {
  if (!write_all(STDOUT_FILENO, "c " + line + "\n")) throw base::system_error("can't answer the launcher");
}

}  // namespace

int run_as_host() {
  std::signal(SIGPIPE, SIG_IGN);
  say(std::string("hello ") + kVersion + " " + comm::host_identity());
  HostControl control;
  const std::optional<std::string> line = control.next_line();
  if (!line) return 1;
  const Json order = Json::parse(*line, nullptr, false);
  if (order.is_discarded()) throw base::InvalidUsage("run --as-host: it is for `tessera run --hosts` alone");
  const std::string directory = order.at("directory");
  if (::chdir(directory.c_str()) != 0)
    throw base::InvalidUsage(std::string(base::system_error("can't enter the directory '" + directory + "'").what()) +
                             "; give --directory, one that all hosts have");
  LaunchSpec plan{.ranks = order.at("ranks"), .command = order.at("command")};
  for (const auto& [name, value] : order.at("environment").items()) plan.environment.emplace_back(name, value);
  if (order.contains("peer")) {
    const std::string master = master_of(order);
    plan.environment.emplace_back("TESSERA_MASTER", master);
    say("master " + master);
  }
  plan.bind_to_cores = order.at("bind");
  plan.host = HostPart{.first_rank = order.at("first_rank"),
                       .world_size = order.at("world_size"),
                       .run_id = order.at("run_id"),
                       .token = order.at("token"),
                       .control = &control};
  return launch(plan);
}

}  // namespace tessera::tools
