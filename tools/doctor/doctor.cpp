// tessera doctor: checks what goes wrong most, on this host or, through ssh, on several and between them.
#include <poll.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"
#include "tools/cli/commands.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/doctor/checks.h"
#include "tools/launch/host_connection.h"
#include "tools/launch/host_launcher.h"
#include "tools/version.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::ordered_json;
using DoctorClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kToCheck{90};  // a host, with ssh's own time-out and its backends
constexpr std::chrono::seconds kToAnswer{8};
constexpr std::chrono::seconds kToConnect{3};
constexpr std::chrono::seconds kSilence{300};  // of the doctor, while it waits for other hosts

struct DoctorOptions {
  HostOptions hosts;
  std::string json;
  bool as_host = false;  ///< the far side of --hosts
};

double wall_clock() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void answer(const Json& json) {
  if (!write_all(STDOUT_FILENO, "c " + json_text(json) + "\n")) throw base::system_error("can't answer the doctor");
}

/// The far side: reports this host, then answers "clock" and "connect ADDRESS:PORT" until the input ends.
int examine_as_host() {
  std::signal(SIGPIPE, SIG_IGN);
  std::vector<comm::HostPort> places;
  const std::vector<base::UniqueFd> listeners = comm::listen_at_free_port(places);
  Json report = {{"version", kVersion},
                 {"identity", comm::host_identity()},
                 {"machine", machine_line()},
                 {"places", Json::array()},
                 {"findings", Json::array()}};
  for (const comm::HostPort& place : places)
    if (!comm::is_loopback(place.host)) report["places"].push_back(place.text());
  for (const Finding& finding : check_host(true)) report["findings"].push_back(finding_json(finding));
  answer(report);
  HostControl control;
  while (const std::optional<std::string> line = control.next_line(kSilence)) {
    constexpr std::string_view kConnect = "connect ";
    if (!line->starts_with(kConnect)) {
      answer({{"clock", wall_clock()}});
      continue;
    }
    const comm::HostPort place = comm::parse_host_port(line->substr(kConnect.size()), "doctor");
    answer({{"problem", comm::connection_problem(place, DoctorClock::now() + kToConnect)}});
  }
  return 0;
}

/// A host of the examination, by its connection.
class Patient {
 public:
  Patient(const HostLaunchSpec& spec, const std::string& host)
      : tessera_(spec.options.remote_tessera),
        connection_(std::make_unique<HostConnection>(
            host, ProcessSpec{.command = far_side_command(spec.ssh, host, tessera_, "doctor"),
                              .environment = base::environment_with({}),
                              .own_session = true})) {}

  const std::string& name() const { return connection_->host(); }
  const Json& report() const { return report_; }
  bool answers() const { return problem_.empty(); }
  /// "" or why it has sent no report.
  const std::string& problem() const { return problem_; }

  void await_report() {
    if (const auto line = next_answer(started_ + kToCheck)) report_ = *line;
  }
  /// Empty if the host has gone, which problem() then says.
  std::optional<Json> ask(const std::string& question) {
    connection_->send(question);
    return next_answer(DoctorClock::now() + kToAnswer);
  }

 private:
  std::optional<Json> next_answer(DoctorClock::time_point deadline) {
    const auto begin = DoctorClock::now();
    while (answers_.empty()) {
      if (connection_->ended() || DoctorClock::now() >= deadline) {
        problem_ = why_silent(std::chrono::ceil<std::chrono::seconds>(deadline - std::min(begin, deadline)));
        return std::nullopt;
      }
      pollfd entries[] = {
          {connection_->output(), POLLIN, 0}, {connection_->errors(), POLLIN, 0}, {connection_->waiting(), POLLOUT, 0}};
      ::poll(entries, 3, 50);
      if (entries[0].revents != 0)
        connection_->read_output([&](std::string_view line) {
          if (line.starts_with("c ")) answers_.emplace_back(line.substr(2));
        });
      if (entries[1].revents != 0)
        connection_->read_errors([&](std::string_view line) {
          last_error_ = line.substr(0, line.find_last_not_of(" \t\r") + 1);  // ssh ends its lines with CR
        });
      if (entries[2].revents != 0) connection_->flush();
      connection_->reap();
    }
    const std::string text = answers_.front();
    answers_.pop_front();
    return base::parse_json<Json>(text, "host " + name());
  }

  std::string why_silent(std::chrono::seconds patience) const {
    const std::string said = last_error_.empty() ? "" : ": " + last_error_;
    if (!connection_->ended()) return "no answer within " + std::to_string(patience.count()) + " s" + said;
    const int status = connection_->status();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 255) return "no connection" + said;
    return "can't run '" + tessera_ + " doctor' there" + said;
  }

  const std::string tessera_;
  const DoctorClock::time_point started_ = DoctorClock::now();  ///< of all hosts at about the same time
  std::unique_ptr<HostConnection> connection_;
  std::deque<std::string> answers_;
  std::string last_error_;
  std::string problem_;
  Json report_;
};

class Examination {
 public:
  /// What a host, or a pair ("a -> b"), has shown.
  void add(const std::string& host, const Finding& finding) { add_json(host, finding_json(finding)); }
  void add_json(const std::string& host, Json finding) {
    const std::string level = finding["level"], remedy = finding["remedy"];
    print_clean("{:<8} {}{:<14} {}\n", level, host.empty() ? "" : host + ": ", finding["subject"].get<std::string>(),
                finding["found"].get<std::string>());
    if (!remedy.empty()) print_clean("{:<8} remedy: {}\n", "", remedy);
    errors_ += level == "error" ? 1 : 0;
    warnings_ += level == "warning" ? 1 : 0;
    if (!host.empty()) finding["host"] = host;
    findings_.push_back(std::move(finding));
  }
  /// The exit code.
  int finish(const std::string& file) const {
    print_clean("doctor: {} error{}, {} warning{}\n", errors_, errors_ == 1 ? "" : "s", warnings_,
                warnings_ == 1 ? "" : "s");
    write_json(file, {{"version", kVersion}, {"findings", findings_}, {"errors", errors_}, {"warnings", warnings_}});
    return errors_ == 0 ? 0 : 1;
  }

 private:
  Json findings_ = Json::array();
  int errors_ = 0;
  int warnings_ = 0;
};

/// How far the host's clock is ahead of this one's, by the fastest of three answers.
std::optional<double> clock_difference(Patient& host) {
  double difference = 0, fastest = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double before = wall_clock();
    const auto answered = host.ask("clock");
    if (!answered) return std::nullopt;
    const double after = wall_clock();
    if (after - before >= fastest) continue;
    fastest = after - before;
    difference = answered->at("clock").get<double>() - (before + after) / 2;
  }
  return difference;
}

void compare_hosts(Examination& examination, const std::string& tessera, std::deque<Patient>& hosts) {
  constexpr double kClockSeconds = 2;
  Patient& first = hosts.front();
  for (Patient& host : hosts) {
    const std::string version = host.report().at("version"), machine = host.report().at("machine");
    const std::string of_first = first.report().at("machine");
    if (version != kVersion)
      examination.add(host.name(), {"error", "version", "'" + tessera + "' is " + version + ", here it is " + kVersion,
                                    "install the same version, or give --remote-tessera PATH"});
    if (machine != of_first)
      examination.add(host.name(), {"note", "machine", machine + "; " + first.name() + " is " + of_first,
                                    "the slower host sets the pace; TESSERA_PRODUCTS=own has the same bits on both"});
    if (&host != &first && host.report().at("identity") == first.report().at("identity"))
      examination.add(host.name(), {"note", "identity", "it is the same host as " + first.name()});
    const std::optional<double> difference = clock_difference(host);
    if (difference && std::abs(*difference) > kClockSeconds)
      examination.add(host.name(), {"warning", "clock", fmt::format("{:+.1f} s from this host's", *difference),
                                    "install chrony on all hosts: certificates and logs are compared by time"});
  }
}

/// Returns whether each host reaches the others at ports that the system chooses, as the backends' connections do.
bool connect_hosts(Examination& examination, std::deque<Patient>& hosts) {
  bool all_reach = true;
  for (Patient& from : hosts)
    for (Patient& to : hosts) {
      if (&from == &to || !from.answers() || !to.answers()) continue;
      std::string reached, problems;
      for (const Json& place : to.report().at("places")) {
        const auto answered = from.ask("connect " + place.get<std::string>());
        if (!answered) break;
        const std::string problem = answered->at("problem");
        if (problem.empty())
          reached = place;
        else
          problems += (problems.empty() ? "" : "; ") + place.get<std::string>() + ": " + problem;
      }
      all_reach &= !reached.empty();
      const std::string pair = from.name() + " -> " + to.name();
      if (!from.answers())
        examination.add(from.name(), {"error", "ssh", from.problem()});
      else if (reached.empty())
        examination.add(pair, {"error", "ports", problems.empty() ? "it has no address" : problems,
                               "let the hosts reach each other at all TCP ports (firewall, routes)"});
      else if (!problems.empty())
        examination.add(pair, {"note", "ports", reached + " answers, but not " + problems,
                               "TESSERA_IFNAME chooses the interface if the ranks don't find each other"});
      else
        examination.add(pair, {"ok", "ports", reached + " answers"});
    }
  return all_reach;
}

/// A world with a rank on each host, by tessera run.
void run_world(Examination& examination, const HostLaunchSpec& spec) {
  const HostOptions& options = spec.options;
  const std::string names = joined_by(each_of(spec.hosts, &HostSlots::name), ",");
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe"), "run"};
  command.insert(command.end(), {"--hosts", names, "--ssh", options.ssh, "--remote-tessera", options.remote_tessera,
                                 "--directory", "/"});
  for (const std::string& name : options.forward) command.insert(command.end(), {"--forward", name});
  if (!options.address.empty()) command.insert(command.end(), {"--address", options.address});
  command.insert(command.end(),
                 {"--", options.remote_tessera, "bench", "all_reduce", "-b", "1M", "-e", "1M", "-n", "3", "--check"});
  const Captured run = capture({.command = command, .environment = base::environment_with({})}, kToCheck);
  if (run.ended && run.status == 0)
    examination.add("", {"ok", "world", fmt::format("a rank on each of {} hosts sums 1 MiB", spec.hosts.size())});
  else
    examination.add("", {"error", "world", run.ended ? run.last_error : "it doesn't end within 90 s",
                         "tessera run --hosts " + names + " -- tessera bench all_reduce"});
}

int examine_hosts(const DoctorOptions& options) {
  std::signal(SIGPIPE, SIG_IGN);
  const HostLaunchSpec spec = host_launch_spec(options.hosts, std::nullopt);
  std::deque<Patient> hosts;
  for (const HostSlots& host : spec.hosts) hosts.emplace_back(spec, host.name);
  Examination examination;
  bool all_answer = true;
  for (Patient& host : hosts) {
    host.await_report();
    all_answer &= host.answers();
    if (!host.answers())
      examination.add(host.name(), {"error", "ssh", host.problem(),
                                    "check: ssh -o BatchMode=yes " + host.name() + " true, and --remote-tessera PATH"});
    else
      for (const Json& finding : host.report().at("findings")) examination.add_json(host.name(), finding);
  }
  if (all_answer) {
    compare_hosts(examination, spec.options.remote_tessera, hosts);
    if (connect_hosts(examination, hosts) && hosts.size() > 1) run_world(examination, spec);
  }
  return examination.finish(options.json);
}

int run_doctor(const DoctorOptions& options) {
  if (options.as_host) return examine_as_host();
  check_outputs({{"--json", options.json}}, {options.hosts.hostfile});
  if (options.hosts.given()) return examine_hosts(options);
  Examination examination;
  for (const Finding& finding : check_host(false)) examination.add("", finding);
  return examination.finish(options.json);
}

}  // namespace

void add_doctor(CommandLine& commands) {
  CLI::App* doctor = commands.app.add_subcommand("doctor", "check this host, or several, for what goes wrong most");
  const auto options = std::make_shared<DoctorOptions>();
  add_option(*doctor, "--json", options->json, "write the findings as JSON", "FILE");
  add_host_options(*doctor, options->hosts);
  doctor->add_flag("--as-host", options->as_host)->group("");  // what --hosts runs on each host
  doctor->footer("Exit code 1 if there is an error. Warnings and notes don't change it.");
  doctor->callback([&commands, options] { commands.chosen = [options] { return run_doctor(*options); }; });
}

}  // namespace tessera::tools
