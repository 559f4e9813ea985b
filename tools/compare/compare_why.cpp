#include "tools/compare/compare_why.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

/// What the simulations start from; only the ratio of its two speeds stays.
constexpr MachineSpec kUncalibrated{.flops = 50e9, .bytes_per_second = 10e9};

std::string text_of(const RunName& run) { return run.wrap.empty() ? run.strategy : run.strategy + " " + run.wrap; }

std::size_t find_run(const std::string& name, const std::vector<RunName>& runs) {
  RunName wanted = parse_run_name(name);
  wanted.strategy = fsdp::parse_strategy(wanted.strategy, fsdp::CollectiveRegistry::built_in()).name;
  std::string known;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].strategy == wanted.strategy && runs[i].wrap == wanted.wrap) return i;
    known += (known.empty() ? "" : ", ") + text_of(runs[i]);
  }
  throw InvalidUsage(fmt::format("--why: '{}' is not among the runs; use two of: {}", name, known));
}

}  // namespace

RunName parse_run_name(const std::string& name) {
  const std::size_t space = name.find(' ');
  return {name.substr(0, space), space == std::string::npos ? "" : name.substr(space + 1)};
}

std::pair<RunName, RunName> runs_of_why(const std::vector<std::string>& names) {
  if (names.size() != 2)
    throw InvalidUsage(fmt::format("--why needs two runs, such as ddp,fsdp, not {}", names.size()));
  return {parse_run_name(names[0]), parse_run_name(names[1])};
}

std::pair<std::size_t, std::size_t> find_runs(const std::vector<std::string>& names, const std::vector<RunName>& runs) {
  const std::pair places{find_run(names[0], runs), find_run(names[1], runs)};
  if (places.first == places.second)
    throw InvalidUsage(fmt::format("--why {},{}: both are the same run; give two", names[0], names[1]));
  return places;
}

Why measured_why(const PlannedRun& from, const PlannedRun& to,
                 const std::pair<std::vector<StepParts>, std::vector<StepParts>>& parts, const comm::SlowLinks& links) {
  Why why = explain_gap(parts.first, parts.second);
  why.from = from.name;
  why.to = to.name;
  why.link = link_words(links);
  const StepParts a = mean_of(parts.first), b = mean_of(parts.second);
  const LinkedMachine start{links, kUncalibrated, from.plan.ranks};
  why.helps = what_helps(from, to, calibrated(start, from, to, a.compute + a.optimizer + b.compute + b.optimizer));
  return why;
}

}  // namespace tessera::tools
