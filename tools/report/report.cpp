// tessera report: makes the page with pictures from files that `compare --json` wrote, or the postmortem of a run: what
// its ranks did last, and where they diverged.
#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/core/op_traits.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/pages/page.h"
#include "tools/report/flight_log.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

constexpr std::size_t kLastCalls = 5;

struct Postmortem {
  std::vector<FlightLog> logs;       // by rank
  std::vector<std::string> ignored;  // files of older runs
  std::vector<int> missing;          // ranks without a file
  std::optional<FirstDivergence> divergence;
  std::string first_cause;  // as the launcher has it; "": it wrote none
  std::int64_t end_ns = 0;  // the last time in any file
};

/// "rank 2", "ranks 0 and 3", "ranks 0-4, 6 and 9".
std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i >= 3) {
      runs.push_back(fmt::format("{}-{}", ranks[i], ranks[end - 1]));
    } else {
      for (std::size_t k = i; k < end; ++k) runs.push_back(std::to_string(ranks[k]));
    }
    i = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined_by_and(runs);
}

/// "all_gather #47", "recv".
std::string operation_text(const FlightCall& call) {
  std::string text(comm::name_of(call.kind));
  if (call.sequence > 0) return text + fmt::format(" #{}", call.sequence);
  return text + (call.kind == comm::OpKind::send ? " to rank " : " from rank ") + std::to_string(call.root);
}

/// What must be equal on all ranks: "all_gather of 49.4 kB f32 for h.1".
std::string signature_text(const FlightCall& call) {
  std::string text(comm::name_of(call.kind));
  if (call.kind != comm::OpKind::barrier) text += fmt::format(" of {} B {}", call.bytes, base::name_of(call.dtype));
  if (comm::reduces(call.kind)) text += fmt::format(" {}", comm::name_of(call.reduce));
  if (comm::has_root(call.kind)) text += fmt::format(" root {}", call.root);
  return call.label.empty() ? text : text + " for " + call.label;
}

std::string step_text(const FlightCall& call) {
  return call.step == 0 ? "before the first step" : fmt::format("in step {}", call.step);
}

std::string among_text(const FlightGroup& group, int ranks) {
  if (std::ssize(group.members) == ranks) return "";
  std::vector<int> members = group.members;
  std::ranges::sort(members);
  return " among " + ranks_text(members);
}

bool has(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

/// "which ranks 0, 1 and 3 wait in".
std::string waiting_text(const FirstDivergence& divergence) {
  std::vector<int> waiting, called;
  for (const auto& [rank, call] : divergence.calls) {
    if (divergence.kind == FirstDivergence::Kind::died_in && has(divergence.ranks, rank)) continue;
    (call.ended_well() ? called : waiting).push_back(rank);
  }
  if (waiting.empty()) return "which " + ranks_text(called) + " called";
  return "which " + ranks_text(waiting) + (waiting.size() == 1 ? " waits in" : " wait in");
}

std::string divergence_text(const FirstDivergence& divergence, int ranks) {
  const FlightCall& first = divergence.calls.begin()->second;
  const std::string among = among_text(divergence.group, ranks);
  const std::string who = ranks_text(divergence.ranks);
  const std::string call =
      fmt::format("{} ({}){} {}", operation_text(first), signature_text(first), among, step_text(first));
  const bool died = divergence.kind == FirstDivergence::Kind::died_in;
  if (died || divergence.kind == FirstDivergence::Kind::never_called)
    return fmt::format("{} {} {}, {}", who, died ? "died in" : "never called", call, waiting_text(divergence));
  if (divergence.kind == FirstDivergence::Kind::no_file)
    return fmt::format(
        "{} left no file: killed before the start, or on a host with another directory; {} is the first call {}", who,
        call, waiting_text(divergence));
  std::vector<int> others;
  for (const auto& [rank, made] : divergence.calls)
    if (!has(divergence.ranks, rank)) others.push_back(rank);
  const FlightCall& theirs = divergence.calls.at(others.front());
  const FlightCall& own = divergence.calls.at(divergence.ranks.front());
  return fmt::format("as collective #{}{} {}, {} called {} where {} called {}", divergence.sequence, among,
                     step_text(theirs), who, signature_text(own), ranks_text(others), signature_text(theirs));
}

/// Its file is still mapped, so the process has not been replaced by another one of the same number.
bool still_runs(const FlightLog& log) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  if (log.host != host.data()) return false;
  std::ifstream maps("/proc/" + std::to_string(log.process) + "/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  return text.find("/rank-" + std::to_string(log.rank) + ".flight") != std::string::npos;
}

std::string_view end_text(const FlightLog& log) {
  if (log.end == FlightEnd::exception || !log.failures.empty()) return "failed";
  if (log.end == FlightEnd::closed) return "closed";
  return still_runs(log) ? "running" : "killed";
}

std::string_view state_text(const FlightCall& call) {
  return comm::flight::kStateNames[static_cast<std::size_t>(call.state) - 1];
}

/// As the launcher wrote it; "" if it wrote none.
std::string first_cause_in(const std::string& directory) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 20;
  const std::string path = directory + "/" + kFirstCause;
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return "";
  const base::FileText read = base::read_regular(path, kMost, O_NOFOLLOW);
  if (!read.problem.empty())
    throw base::InvalidUsage("report --postmortem: can't read '" + path + "': " + read.problem + "; remove it");
  return read.text.substr(0, read.text.find('\n'));
}

Postmortem postmortem_of(const std::string& directory) {
  Postmortem result;
  result.logs = read_flight_logs(directory, result.ignored);
  const int ranks = result.logs.front().ranks;
  for (int rank = 0; rank < ranks; ++rank)
    if (std::ranges::find(result.logs, rank, &FlightLog::rank) == result.logs.end()) result.missing.push_back(rank);
  for (const FlightLog& log : result.logs)
    for (const FlightCall& call : log.calls) result.end_ns = std::max({result.end_ns, call.issued_ns, call.ended_ns});
  result.divergence = find_first_divergence(result.logs);
  result.first_cause = first_cause_in(directory);
  return result;
}

bool all_closed(const Postmortem& result) {
  const auto closed = [](const FlightLog& log) { return log.end == FlightEnd::closed && log.failures.empty(); };
  return result.missing.empty() && std::ranges::all_of(result.logs, closed);
}

/// The first line: the answer.
std::string verdict(const Postmortem& result) {
  const int ranks = result.logs.front().ranks;
  if (result.divergence) return "first divergence: " + divergence_text(*result.divergence, ranks);
  if (all_closed(result)) return fmt::format("no divergence: {} ranks made the same calls and closed", ranks);
  if (!result.missing.empty())
    return fmt::format("{} left no file, and no other rank waits", ranks_text(result.missing));
  return "no divergence: no rank waits for a call that another one has not made";
}

/// The earliest failure that is not the consequence of another rank's.
std::string first_failure(const Postmortem& result) {
  const FlightLog* first = nullptr;
  const FlightFailure* failure = nullptr;
  for (const FlightLog& log : result.logs)
    for (const FlightFailure& one : log.failures) {
      if (one.text.starts_with("PeerLost") || one.text.starts_with("Aborted")) continue;
      if (failure != nullptr && failure->at_ns <= one.at_ns) continue;
      first = &log;
      failure = &one;
    }
  return failure == nullptr ? "" : fmt::format("first failure: rank {}: {}\n", first->rank, failure->text);
}

std::string last_calls(const FlightLog& log, std::int64_t end_ns) {
  std::vector<std::vector<std::string>> rows = {{"call", "for", "step", "bytes", "state", "took", "before the end"}};
  const auto ms = [](std::int64_t ns) { return fmt::format("{:.1f} ms", static_cast<double>(ns) / 1e6); };
  for (std::size_t i = log.calls.size() - std::min(kLastCalls, log.calls.size()); i < log.calls.size(); ++i) {
    const FlightCall& call = log.calls[i];
    rows.push_back({operation_text(call), call.label.empty() ? "-" : call.label, std::to_string(call.step),
                    human_bytes(static_cast<double>(call.bytes)), std::string(state_text(call)),
                    call.ended_ns == 0 ? "-" : ms(call.ended_ns - call.issued_ns), ms(end_ns - call.issued_ns)});
  }
  return text_table(rows);
}

std::string table(const Postmortem& result) {
  std::vector<std::vector<std::string>> rows = {{"rank", "end", "calls", "last call", "for", "step", "state"}};
  for (const FlightLog& log : result.logs) {
    std::vector<std::string>& row = rows.emplace_back();
    row = {std::to_string(log.rank), std::string(end_text(log))};
    if (log.calls.empty()) {
      row.insert(row.end(), {"0", "-", "-", "-", "-"});
      continue;
    }
    const FlightCall& last = log.calls.back();
    row.insert(row.end(), {std::to_string(last.number), operation_text(last), last.label.empty() ? "-" : last.label,
                           std::to_string(last.step), std::string(state_text(last))});
  }
  return text_table(rows);
}

std::string text_of(const Postmortem& result) {
  const FlightLog& first = result.logs.front();
  const auto seconds = std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(std::chrono::nanoseconds(first.started_ns)));
  std::string text =
      fmt::format("{} ranks over {}, started {:%Y-%m-%d %H:%M:%S} UTC\n{}\n{}", first.ranks, first.backend,
                  fmt::gmtime(std::chrono::system_clock::to_time_t(seconds)), verdict(result), first_failure(result));
  if (!result.first_cause.empty()) text += "first cause, by the launcher: " + result.first_cause + "\n";
  text += "\n" + table(result);
  std::vector<int> shown;
  if (result.divergence) shown = result.divergence->ranks;
  for (const FlightLog& log : result.logs)
    if (has(shown, log.rank))
      text += fmt::format("\nlast calls of rank {} ({}):\n", log.rank, end_text(log)) + last_calls(log, result.end_ns);
  for (const std::string& name : result.ignored) text += "\nignored " + name + ": of an older run";
  return text + (result.ignored.empty() ? "" : "\n");
}

ordered_json json_of(const FlightCall& call) {
  return {{"operation", comm::name_of(call.kind)},
          {"sequence", call.sequence},
          {"unit", call.label},
          {"step", call.step},
          {"bytes", call.bytes},
          {"dtype", base::name_of(call.dtype)},
          {"state", state_text(call)},
          {"issued_ns", call.issued_ns},
          {"ended_ns", call.ended_ns}};
}

ordered_json json_of(const FirstDivergence& divergence) {
  constexpr std::array<const char*, 4> kDivergenceKinds = {"never_called", "differs", "no_file", "died_in"};
  ordered_json calls = ordered_json::array();
  for (const auto& [rank, call] : divergence.calls) {
    calls.push_back({{"rank", rank}});
    calls.back().update(json_of(call));
  }
  return {{"kind", kDivergenceKinds[static_cast<std::size_t>(divergence.kind)]},
          {"ranks", divergence.ranks},
          {"sequence", divergence.sequence},
          {"communicator", divergence.group.name},
          {"members", divergence.group.members},
          {"calls", calls}};
}

ordered_json json_of(const Postmortem& result) {
  ordered_json logs = ordered_json::array();
  for (const FlightLog& log : result.logs) {
    ordered_json failures = ordered_json::array(), calls = ordered_json::array();
    for (const FlightFailure& failure : log.failures)
      failures.push_back({{"at_ns", failure.at_ns}, {"text", failure.text}});
    for (const FlightCall& call : log.calls) {
      calls.push_back(json_of(call));
      calls.back()["communicator"] = log.groups.at(call.communicator).name;
      calls.back()["members"] = log.groups.at(call.communicator).members;
    }
    logs.push_back(
        {{"rank", log.rank}, {"host", log.host}, {"end", end_text(log)}, {"failures", failures}, {"calls", calls}});
  }
  return {{"ranks", result.logs.front().ranks},
          {"backend", result.logs.front().backend},
          {"verdict", verdict(result)},
          {"divergence", result.divergence ? json_of(*result.divergence) : ordered_json(nullptr)},
          {"first_cause", result.first_cause.empty() ? ordered_json(nullptr) : ordered_json(result.first_cause)},
          {"missing", result.missing},
          {"by_rank", logs}};
}

/// Prints the postmortem of the newest run that recorded in `directory`, and writes it as JSON to `json` unless that is
/// empty. Throws InvalidUsage if the directory has no complete file of the flight recorder.
void print_postmortem(const std::string& directory, const std::string& json) {
  std::vector<std::string> inputs;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error))
    if (entry.path().extension() == ".flight" || entry.path().filename() == kFirstCause)
      inputs.push_back(entry.path().string());
  check_outputs({{"--json", json}}, inputs);
  const Postmortem result = postmortem_of(directory);
  print_clean("{}", text_of(result));
  write_json(json, json_of(result), 2);
}

struct ReportOptions {
  std::vector<std::string> files;
  std::string output;
  std::string postmortem;  // directory
  std::string json;
};

Comparison read_comparison(const std::string& path) {
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty())
    throw base::InvalidUsage("report: can't read '" + path + "': " + read.problem +
                             "; give a file that `tessera compare --json` wrote");
  return parse_comparison(base::parse_json<nlohmann::json>(read.text, "report: '" + path + "'"), path);
}

int run_report(const ReportOptions& options) {
  if (!options.postmortem.empty()) {
    print_postmortem(options.postmortem, options.json);
    return 0;
  }
  check_outputs({{"--output", options.output}}, options.files);
  write_file(options.output, pages::page(each_of(options.files, read_comparison)));
  print_clean("wrote {}\n", options.output);
  return 0;
}

}  // namespace

void add_report(CommandLine& commands) {
  CLI::App* report = commands.app.add_subcommand(
      "report", "write an HTML page with charts of the results of compare, or explain a failure");
  const auto options = std::make_shared<ReportOptions>();
  CLI::Option* files = add_option(*report, "RUN.json", options->files, "result files of tessera compare --json");
  CLI::Option* output =
      add_option(*report, "-o,--output", options->output, "page to write; an existing file is replaced", "FILE.html");
  CLI::Option* postmortem =
      add_option(*report, "--postmortem", options->postmortem,
                 "print where the ranks of a run diverged, from the directory of its --flight-recorder", "DIR")
          ->excludes(files)
          ->excludes(output);
  add_option(*report, "--json", options->json, "with --postmortem: write it as JSON, too", "FILE")->needs(postmortem);
  report->callback([&commands, options, files, output] {
    if (options->postmortem.empty())
      for (const CLI::Option* needed : {files, output})
        if (needed->count() == 0) throw CLI::RequiredError(needed->get_name());
    commands.chosen = [options] { return run_report(*options); };
  });
}

}  // namespace tessera::tools
