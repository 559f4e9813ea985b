#include "tools/launch/host_launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tools/cli/output.h"
#include "tools/launch/host_connection.h"
#include "tools/launch/process.h"
#include "tools/launch/ranks.h"
#include "tools/version.h"

namespace tessera::tools {
namespace {

using HostClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kToStart{30};  // until a far side answers
constexpr std::chrono::seconds kToEnd{8};     // from a failure until the connections are ended
constexpr std::chrono::milliseconds kSameTime{
    200};                           // a killed rank is a better cause than one that ended because of it
constexpr int kLostConnection = 2;  // weight of a cause, as that of a killed rank

/// Of this process or its ranks, or of one host alone.
constexpr std::string_view kNotForwarded[] = {
    "TESSERA_RANK",  "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK",    "TESSERA_LOCAL_WORLD_SIZE", "TESSERA_RUN_ID",
    "TESSERA_TOKEN", "TESSERA_MASTER",     "TESSERA_LAUNCH_SOCKET", "TESSERA_LAUNCHER",         "TESSERA_HOST_ID"};

bool is_loopback_address(const std::string& text) {
  return text.starts_with("127.") || text.starts_with("[::1]") || text.starts_with("localhost");
}

/// One host of the run.
struct Member {
  std::unique_ptr<HostConnection> connection;
  int first_rank = 0;
  int ranks = 0;
  std::string identity;    ///< of the host; "": it has not answered
  bool ordered = false;    ///< its order has been sent
  std::string last_error;  ///< last line on standard error, without "tessera: "
};

struct HostCause {
  std::size_t host = 0;
  int weight = 0;
  int rank = -1;  ///< -1: the host
  HostClock::time_point when;
  std::string text;  ///< "": what the host says at its end
  int code = 1;
};

class HostLauncher {
 public:
  explicit HostLauncher(const HostLaunchSpec& spec) : spec_(spec), tessera_(spec.options.remote_tessera) {
    int world_size = 0;
    for (const HostSlots& host : spec.hosts) world_size += host.slots;
    nlohmann::ordered_json environment = nlohmann::ordered_json::object();
    if (spec.hosts.size() > 1) environment["TESSERA_BACKEND"] = "auto";  // the default, shm, is for one host
    for (const std::string& entry : base::environment_with({})) {
      const std::string name = entry.substr(0, entry.find('='));
      const bool ours =
          name.starts_with("TESSERA_") && std::ranges::find(kNotForwarded, name) == std::end(kNotForwarded);
      if (ours || std::ranges::find(spec.options.forward, name) != spec.options.forward.end())
        environment[name] = entry.substr(name.size() + 1);
    }
    order_ = {{"command", spec.command},
              {"environment", environment},
              {"directory",
               spec.options.directory.empty() ? std::filesystem::current_path().string() : spec.options.directory},
              {"world_size", world_size},
              {"run_id", run_id_},
              {"token", token_},
              {"bind", spec.bind_to_cores}};
    for (int rank = 0; spec.log_dir && rank < world_size; ++rank) {
      const std::string path = *spec.log_dir / ("rank-" + std::to_string(rank) + ".log");
      base::OpenedFile file = base::open_regular(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
      if (!file.fd)
        throw base::InvalidUsage("--log-dir: can't write '" + path + "': " + file.problem +
                                 "; give a writable directory");
      logs_.emplace(rank, std::move(file.fd));
    }
  }

  int run() {
    std::signal(SIGPIPE, SIG_IGN);
    connect();
    std::vector<bool> done(members_.size());
    while (std::ranges::find(done, false) != done.end()) {
      pump();
      send_orders();
      check_time();
      for (std::size_t i = 0; i < members_.size(); ++i) {
        members_[i].connection->reap();
        if (done[i] || !members_[i].connection->ended()) continue;
        done[i] = true;
        on_end(i);
      }
    }
    return report();
  }

 private:
  void connect() {
    const std::pair<std::string, std::string> marker[] = {{"TESSERA_RUN_ID", marker_}};
    int rank = 0;
    for (const HostSlots& host : spec_.hosts) {
      ProcessSpec process{.command = far_side_command(spec_.ssh, host.name, tessera_, "run"),
                          .environment = base::environment_with(marker)};
      process.own_session = true;
      try {
        members_.push_back({.connection = std::make_unique<HostConnection>(host.name, process),
                            .first_rank = rank,
                            .ranks = host.slots});
      } catch (const base::InvalidUsage& error) {
        throw base::InvalidUsage("run: " + std::string(error.what()) + "; install openssh-client, or give --ssh");
      }
      rank += host.slots;
    }
  }

  /// The first host chooses the rendezvous' address; the others are told it.
  void send_orders() {
    const bool several = members_.size() > 1;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      Member& member = members_[i];
      if (member.ordered || member.identity.empty() || ending_since_ || (i > 0 && master_.empty())) continue;
      if (i > 0 && member.identity != members_.front().identity && is_loopback_address(master_)) {
        blame(
            {.weight = kLostConnection,
             .text = "the rendezvous' address is " + master_ + " there, which host " + member.connection->host() +
                     " can't reach; correct its name in /etc/hosts there, or give --address, the address of the first "
                     "host",
             .code = 2});
        return;
      }
      nlohmann::ordered_json order = order_;
      order["first_rank"] = member.first_rank;
      order["ranks"] = member.ranks;
      if (i > 0) order["environment"]["TESSERA_MASTER"] = master_;
      if (i == 0 && several) {
        order["address"] = spec_.options.address;
        order["peer"] = name_in_network(spec_.ssh, members_[1].connection->host());
      }
      member.connection->send(json_text(order));
      member.ordered = true;
    }
  }

  void on_line(std::size_t host, std::string_view line) {
    if (line.starts_with("c "))
      on_answer(host, std::string(line.substr(2)));
    else if (members_[host].ordered && (line.starts_with("o ") || line.starts_with("e ")))
      on_rank_line(line);  // else the shell's start files print something
  }

  void on_answer(std::size_t host, const std::string& text) {
    Member& member = members_[host];
    std::istringstream words(text);
    std::string kind;
    words >> kind;
    if (kind == "hello") {
      std::string version;
      words >> version >> member.identity;
      if (version != kVersion)
        blame({.host = host,
               .weight = kLostConnection,
               .text = "'" + tessera_ + "' there is tessera " + version + ", here it is " + kVersion +
                       "; install the same version, or give --remote-tessera PATH",
               .code = 2});
    } else if (kind == "master") {
      words >> master_;
    } else if (kind == "failed") {
      HostCause cause{.host = host};
      words >> cause.weight >> cause.rank;
      blame(cause);
    }
  }

  void on_rank_line(std::string_view line) {
    const std::size_t space = line.find(' ', 2);
    if (space == std::string_view::npos) return;
    const std::string number(line.substr(2, space - 2));
    const int rank = std::atoi(number.c_str());
    const std::string text = std::string(line.substr(space + 1)) + "\n";
    if (const auto log = logs_.find(rank); log != logs_.end() && log->second && !write_all(log->second.get(), text)) {
      errors_.write("tessera: warning: --log-dir: can't write the log of rank " + number +
                    "; later output is missing\n");
      log->second.reset();
    }
    (line.front() == 'o' ? output_ : errors_).write((spec_.tag ? "[" + number + "] " : "") + text);
  }

  void on_error_line(std::size_t host, std::string_view line) {
    constexpr std::string_view kOurs = "tessera: ";
    if (line.starts_with("tessera: note: ") || line.starts_with("tessera: warning: "))
      return errors_.write(std::string(line) + " (host " + members_[host].connection->host() + ")\n");
    const std::size_t skipped = line.starts_with(kOurs) ? kOurs.size() : 0;
    const std::size_t last = line.find_last_not_of(" \t\r");  // ssh ends its lines with CR
    if (last != std::string_view::npos && last >= skipped)
      members_[host].last_error = line.substr(skipped, last + 1 - skipped);
  }

  /// The connection's process has ended, and all that it printed has been read.
  void on_end(std::size_t host) {
    const Member& member = members_[host];
    const int status = member.connection->status();
    if (status == 0 && member.ordered) return;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 255;
    const std::string said = member.last_error.empty() ? "" : ": " + member.last_error;
    HostCause cause{.host = host, .weight = kLostConnection};
    if (!member.identity.empty()) {
      cause.code = code == 2 ? 2 : 1;
      cause.text =
          code == 255 || code == 0 || member.last_error.empty() ? "the connection is lost" + said : said.substr(2);
    } else {
      cause.code = 2;
      if (code == 255)
        cause.text = "no connection" + said + "; check: ssh -o BatchMode=yes " + member.connection->host() + " true";
      else
        cause.text = "can't run '" + tessera_ + "' there (code " + std::to_string(code) + ")" + said +
                     "; install tessera " + kVersion + " there, or give --remote-tessera PATH";
    }
    if (cause_ && cause_->host == host && cause_->text.empty()) {  // a rank's failure: this is what the host says of it
      cause_->text = cause.text;
      cause_->code = cause.code;
    } else if (!ending_since_ || (WIFEXITED(status) && code == 255)) {
      blame(cause);
    }
  }

  /// The first failure is the cause, except that a rank killed at the same time is better than one that ended, and any
  /// other is better than a rank that failed because of another.
  void blame(HostCause cause) {
    cause.when = HostClock::now();
    const bool better =
        cause_ && cause.weight > cause_->weight && (cause_->weight == 0 || cause.when - cause_->when < kSameTime);
    if (!cause_ || better) cause_ = cause;
    if (ending_since_) return;
    ending_since_ = cause.when;
    tell_all("fail");
  }

  void tell_all(const std::string& line) {
    for (Member& member : members_) {
      if (member.ordered)
        member.connection->send(line);
      else
        member.connection->hang_up();
    }
  }

  void pump() {
    std::vector<pollfd> waiting = {
        {signals_.descriptor(), POLLIN, 0}, {output_.waiting(), POLLOUT, 0}, {errors_.waiting(), POLLOUT, 0}};
    const std::size_t others = waiting.size();
    const bool full = output_.full() || errors_.full();
    for (const Member& member : members_) {
      waiting.push_back({full ? -1 : member.connection->output(), POLLIN, 0});
      waiting.push_back({full ? -1 : member.connection->errors(), POLLIN, 0});
      waiting.push_back({member.connection->waiting(), POLLOUT, 0});
    }
    ::poll(waiting.data(), waiting.size(), ending_since_ ? 50 : 500);
    output_.flush();
    errors_.flush();
    for (std::size_t i = 0; i < members_.size(); ++i) {
      HostConnection& connection = *members_[i].connection;
      const auto on_output = [&](std::string_view line) { on_line(i, line); };
      const auto on_errors = [&](std::string_view line) { on_error_line(i, line); };
      if (waiting[others + 3 * i].revents != 0) connection.read_output(on_output);
      if (waiting[others + 3 * i + 1].revents != 0) connection.read_errors(on_errors);
      if (waiting[others + 3 * i + 2].revents != 0) connection.flush();
    }
    if (const int signal = signals_.next_signal(); signal != 0) on_interrupt(signal);
  }

  void check_time() {
    const auto now = HostClock::now();
    if (now - beat_ >= kHostHeartbeat) {
      beat_ = now;
      for (Member& member : members_) member.connection->send("alive");
    }
    for (std::size_t i = 0; !ending_since_ && now - started_ >= kToStart && i < members_.size(); ++i)
      if (members_[i].identity.empty())
        blame({.host = i,
               .weight = kLostConnection,
               .text = "no answer within " + std::to_string(kToStart.count()) + " s; check: ssh -o BatchMode=yes " +
                       members_[i].connection->host() + " true",
               .code = 2});
    if (ending_since_ && now - *ending_since_ >= kToEnd)
      for (Member& member : members_) member.connection->kill();
  }

  void on_interrupt(int signal) {
    if (interrupted_by_ == 0) interrupted_by_ = signal;
    if (!ending_since_) ending_since_ = HostClock::now();
    tell_all("signal " + std::to_string(signal));
    for (Member& member : members_)
      if (!member.ordered) member.connection->kill();
  }

  /// False: a reader has not consumed all output in time after the run failed.
  bool write_rest() {
    auto deadline = HostClock::now() + std::chrono::seconds(2);
    while (!output_.empty() || !errors_.empty()) {
      pump();
      if (!ending_since_) deadline = HostClock::now() + std::chrono::seconds(2);
      if (HostClock::now() >= deadline) return false;
    }
    return true;
  }

  int report() {
    const bool written = write_rest();
    int code = 0;
    std::string text;
    if (interrupted_by_ != 0) {
      code = 1;
      text = "stopped by signal " + std::to_string(interrupted_by_) + " (" + signal_name(interrupted_by_) + ")";
    } else if (cause_) {
      code = cause_->code;
      text = "host " + members_[cause_->host].connection->host() + ": " +
             (cause_->text.empty() ? "rank " + std::to_string(cause_->rank) + " failed" : cause_->text);
    } else if (output_.error() != 0 || !written) {
      code = 1;
      text = base::system_error("can't write standard output", output_.error()).what();
    }
    if (code != 0) errors_.write("tessera: " + text + "\n");
    write_rest();
    return code;
  }

  const HostLaunchSpec& spec_;
  SignalPipe signals_;
  const std::string run_id_ = "hosts-" + comm::to_hex(comm::random_digest()).substr(0, 16);
  const std::string token_ = comm::to_hex(comm::random_digest());
  const std::string marker_ = "launcher-" + run_id_;  // not the hosts': one may be this host
  OrphanReaper guardian_{"TESSERA_RUN_ID=" + marker_};
  Outlet output_{STDOUT_FILENO};
  Outlet errors_{STDERR_FILENO};
  std::deque<Member> members_;
  std::map<int, base::UniqueFd> logs_;
  const std::string& tessera_;
  std::string master_;
  nlohmann::ordered_json order_;  ///< what is the same for all
  std::optional<HostCause> cause_;
  std::optional<HostClock::time_point> ending_since_;
  int interrupted_by_ = 0;
  HostClock::time_point started_ = HostClock::now();
  HostClock::time_point beat_ = started_;
};

}  // namespace

int launch_on_hosts(const HostLaunchSpec& spec) {
  std::fflush(nullptr);
  return HostLauncher(spec).run();
}

}  // namespace tessera::tools
