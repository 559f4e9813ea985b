#include "tools/compare/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <set>

#include "tessera/base/device.h"
#include "tessera/base/error.h"
#include "tessera/fsdp/mesh.h"
#include "tools/plan/step_plan.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using base::InvalidUsage;
using nlohmann::ordered_json;

constexpr LinkSpec kDefaultLink{20, 100e6};  // plan's
constexpr LinkSpec kDefaultIntra{5, 5e9};
/// What simulations start from; only the ratio of its speeds stays.
constexpr MachineSpec kStart{.flops = 50e9, .bytes_per_second = 10e9};
constexpr double kNoLimit = 1e15;  // bytes per second of links that only record
constexpr std::int64_t kMostSequences = 64;

WhatIf::Setting setting_of(const TrainPlan& plan) {
  WhatIf::Setting setting{.link = kDefaultLink, .intra = kDefaultIntra, .ranks = plan.ranks};
  setting.sequences = plan.options.global_batch / plan.ranks / plan.options.accumulate;
  if (!plan.links || plan.fits_links) return setting;
  setting.link = spec_of(plan.links->link);
  setting.hosts = plan.links->hosts;
  if (setting.hosts > 1) setting.intra = spec_of(plan.links->intra);
  return setting;
}

/// The plan in another setting.
TrainPlan plan_for(const TrainPlan& plan, int ranks, int hosts, std::int64_t sequences) {
  TrainPlan other = plan;
  other.ranks = ranks;
  other.ranks_per_host = ranks / hosts;
  other.options.global_batch = sequences * ranks * plan.options.accumulate;
  other.links.reset();
  return other;
}

StepPlan step_of(const PlannedRun& run, const TrainPlan& plan, const WhatIf::Setting& setting,
                 const MachineSpec& machine, bool with_graph = false) {
  const std::optional<LinkSpec> intra = setting.hosts > 1 ? std::optional(setting.intra) : std::nullopt;
  const ClusterSpec cluster = linked_cluster(setting.link, intra, setting.hosts, setting.ranks, machine);
  return plan_step(plan, run.strategy, simulate(cluster, setting.ranks), {},
                   {.graph = with_graph, .all_memory = with_graph});
}

StepPlan step_here(const PlannedRun& run, const MachineSpec& machine) {
  const WhatIf::Setting setting = setting_of(run.plan);
  return step_of(run, plan_for(run.plan, setting.ranks, setting.hosts, setting.sequences), setting, machine);
}

double computing_ms(const StepParts& parts) { return parts.compute + parts.optimizer; }

/// That on which the ranks would have computed as long as they did, on average over the runs: in words, since plan
/// takes words, and rounded like them.
std::string measured_machine(const std::vector<PlannedRun>& contestants, const std::vector<RunResult>& runs) {
  double measured_ms = 0, simulated_ms = 0;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].timeline || runs[i].timeline->ranks.empty()) continue;
    const StepTimeline& timeline = *runs[i].timeline;
    for (const RankTimeline& rank : timeline.ranks)
      measured_ms +=
          computing_ms(cut_step(0, timeline.length_ns, rank.events, {})) / static_cast<double>(timeline.ranks.size());
    const StepPlan step = step_here(contestants[i], kStart);
    simulated_ms += computing_ms(cut_step(step.begin_ns, step.end_ns, step.events, {}));
  }
  const double factor = measured_ms > 0 && simulated_ms > 0 ? simulated_ms / measured_ms : 1;
  return fmt::format("{:.4g}GFLOP/s,{:.4g}GB/s", kStart.flops * factor / 1e9, kStart.bytes_per_second * factor / 1e9);
}

ordered_json actions_of(const StepSchedule& schedule) {
  ordered_json actions = ordered_json::array();
  for (const StepAction& action : schedule.actions)
    actions.push_back(action.index * 4 + static_cast<std::uint32_t>(action.kind));
  return actions;
}

/// Throws InvalidUsage if an operation passes the ports in several rounds.
ordered_json loads_of(const StepSchedule& schedule, int ranks, int hosts) {
  ordered_json loads = ordered_json::array();
  for (const plan::SimulatedOp& operation : schedule.operations) {
    const std::optional<PortLoad> load = port_load(operation, ranks, hosts);
    if (!load) throw InvalidUsage("its operations pass the links in several rounds");
    loads.push_back({load->bytes[0], load->bytes[1], load->messages[0], load->messages[1]});
  }
  return loads;
}

class Schedules {
 public:
  Schedules(const PlannedRun& run, const MachineSpec& machine, std::int64_t most)
      : run_(run), machine_(machine), most_(most) {}

  /// Adds the schedule of these ranks, or the loads of these hosts to that with the same mesh. `own`: throws if the run
  /// can't be simulated; another mesh may be impossible.
  void add(int ranks, int hosts, bool own) {
    try {
      const fsdp::MeshShape mesh = engine_options(plan_for(run_.plan, ranks, hosts, 1), run_.strategy).mesh.value();
      const std::array key{ranks, mesh.size_of(fsdp::kShardAxis)};
      auto found = std::ranges::find(all_, key, &Entry::key);
      if (found == all_.end()) found = all_.insert(found, {key, schedule_for(ranks, hosts), {}});
      found->loads[std::to_string(hosts)] = loads_of(found->schedule, ranks, hosts);
    } catch (const base::Error&) {
      if (own) throw;
    }
  }

  /// Whether the memory of the run's ranks grows in proportion to the sequences. What other ranks share of it doesn't
  /// grow at all.
  bool memory_grows_evenly(int ranks, int hosts) const {
    const StepPlan fewest = planned(ranks, hosts, 1), most = planned(ranks, hosts, most_);
    for (std::int64_t sequences = 2; sequences < most_; sequences *= 2) {
      const double part = static_cast<double>(sequences - 1) / static_cast<double>(most_ - 1);
      if (!grows_evenly(fewest, planned(ranks, hosts, sequences), most, part)) return false;
    }
    return true;
  }

  ordered_json json() const {
    ordered_json json = ordered_json::array();
    for (const Entry& entry : all_)
      json.push_back({{"ranks", entry.key[0]},
                      {"actions", actions_of(entry.schedule)},
                      {"first", entry.schedule.first},
                      {"works", entry.schedule.works},
                      {"work_in_waits", entry.schedule.work_in_waits},
                      {"memory", entry.schedule.memory},
                      {"loads", entry.loads}});
    return json;
  }

 private:
  struct Entry {
    std::array<int, 2> key{};  // ranks and shards
    StepSchedule schedule;
    ordered_json loads;  // by hosts
  };

  StepPlan planned(int ranks, int hosts, std::int64_t sequences) const {
    constexpr LinkSpec kSlow{0, 1e4};
    const WhatIf::Setting setting{kSlow, kSlow, ranks, 1};
    return step_of(run_, plan_for(run_.plan, ranks, hosts, sequences), setting, machine_, true);
  }
  StepSchedule schedule_for(int ranks, int hosts) const {
    std::optional<StepSchedule> schedule = schedule_of(planned(ranks, hosts, 1), planned(ranks, hosts, most_));
    if (!schedule) throw InvalidUsage("the order of its calls depends on the batch");
    return *std::move(schedule);
  }

  const PlannedRun& run_;
  const MachineSpec machine_;
  const std::int64_t most_;
  std::vector<Entry> all_;
};

/// Fills the schedules of `shown`. Throws InvalidUsage if there are none.
void add_schedules(const PlannedRun& run, const WhatIf& what_if, const MachineSpec& machine, WhatIf::Run& shown) {
  const fsdp::Strategy strategy = engine_options(run.plan, run.strategy).strategy;
  if (!fsdp::periodic_axis(strategy).empty())
    throw InvalidUsage("its steps differ, since replicas synchronize only in some of them");
  const WhatIf::Setting& own = what_if.setting;
  Schedules schedules(run, machine, what_if.most_sequences);
  schedules.add(own.ranks, own.hosts, true);
  const std::set<int> ranks{2, 4, 8, 16, 32, 64, own.ranks}, hosts{1, 2, 4, 8, own.hosts};
  for (const int n : ranks)
    for (const int h : hosts)
      if (n % h == 0) schedules.add(n, h, false);
  shown.schedules = schedules.json();
  shown.memory_known = schedules.memory_grows_evenly(own.ranks, own.hosts);
}

}  // namespace

void record_waits(TrainPlan& plan) {
  if (base::parse_device(plan.options.device).type != base::DeviceType::cpu)
    throw InvalidUsage("--why: only waits of ranks on the cpu can be told apart, not on device " + plan.options.device);
  if (!plan.links) {
    plan.links = {.link = {{}, kNoLimit}};
    plan.fits_links = true;
  }
  plan.links->record = true;
}

comm::SlowLinks apply_link_fits(const std::vector<RunResult*>& runs) {
  std::vector<double> latencies, seconds_per_byte;
  for (const RunResult* run : runs) {
    latencies.push_back(run->link_fit.value().latency_us);
    seconds_per_byte.push_back(1 / run->link_fit.value().bytes_per_second);
  }
  const double latency_us = median(std::move(latencies));
  const double rate = 1 / median(std::move(seconds_per_byte));
  for (RunResult* run : runs) {
    const Bytes& bytes = run->wire_bytes_per_step;
    const Calls& calls = run->calls_per_step;
    StepParts& parts = run->parts.value();
    parts.volume = static_cast<double>(bytes.all_gather + bytes.reduce_scatter + bytes.all_reduce) / rate * 1e3;
    parts.latency = (calls.all_gather + calls.reduce_scatter + 2 * calls.all_reduce) * latency_us * 1e-3;
    parts.exposed += parts.transport;
    parts.transport = 0;
  }
  return {.link = {std::chrono::nanoseconds(std::llround(latency_us * 1e3)), rate}};
}

Why measured_why(const PlannedRun& from, const PlannedRun& to,
                 const std::pair<std::vector<StepParts>, std::vector<StepParts>>& parts, const comm::SlowLinks& links) {
  Why why = explain_gap(parts.first, parts.second);
  why.from = from.name;
  why.to = to.name;
  why.link = link_words(links);
  const StepParts a = mean_of(parts.first), b = mean_of(parts.second);
  const LinkedMachine start{links, kStart, from.plan.ranks};
  if (!from.plan.can_be_simulated) return why;
  why.helps = what_helps(from, to, calibrated(start, from, to, a.compute + a.optimizer + b.compute + b.optimizer));
  return why;
}

std::vector<std::string> plan_arguments(const CLI::App& app, const CompareOptions& options) {
  if (!options.init.empty() || !options.resume.empty()) return {};
  const CLI::App &compare = *app.get_subcommand("compare"), &plan = *app.get_subcommand("plan");
  const std::set<std::string> chosen = {"--model",   "--ranks",        "--hosts",      "--link",   "--link-intra",
                                        "--machine", "--global-batch", "--strategies", "--report", "--json",
                                        "--trace",   "--why",          "--help"};
  std::vector<std::string> arguments = {"--model", options.model};
  for (const CLI::Option* option : compare.get_options()) {
    const std::string name = option->get_name();
    if (option->count() == 0 || chosen.contains(name) || plan.get_option_no_throw(name) == nullptr) continue;
    arguments.push_back(name);
    if (option->get_expected_max() == 0) continue;  // a flag
    std::string value;
    for (const std::string& part : option->results()) value += (value.empty() ? "" : ",") + part;
    arguments.push_back(value);
  }
  return arguments;
}

std::optional<WhatIf> what_if_of(const std::vector<PlannedRun>& contestants, const std::vector<RunResult>& runs) {
  const TrainPlan& plan = contestants.front().plan;
  if (base::parse_device(plan.options.device).type != base::DeviceType::cpu) return std::nullopt;
  if (!plan.can_be_simulated) return std::nullopt;
  WhatIf what_if;
  what_if.machine = measured_machine(contestants, runs);
  const MachineSpec machine = parse_machine(what_if.machine, "the measured machine");
  what_if.flops = machine.flops;
  what_if.link_given = plan.links.has_value() && !plan.fits_links;
  what_if.setting = setting_of(plan);
  what_if.seq_len = plan.seq_len;
  what_if.microbatches = plan.options.accumulate;
  what_if.most_sequences = std::max(kMostSequences, what_if.setting.sequences);
  if (plan.options.collectives.empty())
    what_if.parameter_bytes = static_cast<double>(base::size_of(plan.precision.compute));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    WhatIf::Run run{name_of(runs[i]), contestants[i].strategy, runs[i].step_ms_median, 0, ordered_json::array()};
    try {
      add_schedules(contestants[i], what_if, machine, run);
      run.simulated_ms = step_here(contestants[i], machine).result.step_ms_median;
    } catch (const base::Error& error) {
      run.left_out = error.what();
    }
    what_if.runs.push_back(std::move(run));
  }
  return what_if;
}

}  // namespace tessera::tools
