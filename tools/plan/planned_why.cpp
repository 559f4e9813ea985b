#include "tools/plan/planned_why.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/slow_link/ports.h"

namespace tessera::tools {

using base::TraceEvent;
using comm::LinkCall;
using comm::LinkRecord;
using comm::LinkWait;

namespace {

/// An operation of the simulated rank, the last one of its communicator, at the figures of the links.
LinkCall call_of(const plan::TransferRecord& transfer, const LinkedMachine& machine) {
  const plan::SimulatedOp& op = transfer.operation;
  std::vector<int> members;
  for (int i = 0; i < op.members.ranks; ++i) members.push_back(op.members.first + i * op.members.stride);
  const comm::OpDesc desc{
      .kind = op.kind, .in = {nullptr, op.bytes, base::DType::u8, {}}, .out = {nullptr, op.bytes, base::DType::u8, {}}};
  const comm::PortUse use = comm::port_use({machine.links, machine.ranks, members, op.members.ranks - 1}, {&desc, 1});
  LinkCall call{.called_ns = transfer.called_ns, .latency_ns = use.latency.count()};
  for (const std::chrono::nanoseconds port : use.occupied) call.occupied_ns += port.count();
  return call;
}

/// All that a simulated rank waits for is a link. Without what the operation does after its bytes came, such as
/// decoding them.
LinkWait link_wait(const StepPlan& step, const TraceEvent& wait) {
  std::int64_t through = wait.start_ns;
  for (const auto* transfers : {&step.in_flight, &step.transfers})
    for (const plan::TransferRecord& transfer : *transfers)
      if (transfer.done_ns <= wait.end_ns) through = std::max(through, transfer.done_ns);
  return {wait.start_ns, wait.start_ns, through, through};
}

LinkRecord record_of(const StepPlan& step, const LinkedMachine& machine) {
  LinkRecord record;
  for (const TraceEvent& event : step.events)
    if (is_wait(event)) record.waits.push_back(link_wait(step, event));
  for (const plan::TransferRecord& transfer : step.transfers) {
    record.calls.push_back(call_of(transfer, machine));
    // All that it waits for may have been done before the step begins, or be done after it ends: it belongs to the
    // step.
    std::int64_t& called_ns = record.calls.back().called_ns;
    called_ns = std::clamp(called_ns, step.begin_ns, step.end_ns);
  }
  return record;
}

using Change = std::function<void(TrainPlan&, std::string& strategy, LinkedMachine&)>;

/// `from` with the same links, since a change of these changes both.
std::optional<WhyHelp> help_of(const PlannedRun& from, const PlannedRun& to, LinkedMachine machine, const char* name,
                               const Change& change) {
  TrainPlan plan = to.plan;
  std::string strategy = to.strategy;
  change(plan, strategy, machine);
  try {
    const StepPlan step = plan_step({name, strategy, plan}, machine);
    const double ms = step.result.step_ms_median;
    return WhyHelp{name, ms, ms - plan_step(from, machine).result.step_ms_median, step.result.peak_bytes.total_peak};
  } catch (const base::InvalidUsage&) {
    return std::nullopt;  // this model, mesh or plug-in can't
  }
}

std::string words_for(const comm::SlowLink& link) {
  return fmt::format("{:.4g}us,{:.4g}MB/s", static_cast<double>(link.latency.count()) * 1e-3,
                     link.bytes_per_second / 1e6);
}

}  // namespace

LinkSpec spec_of(const comm::SlowLink& link) {
  return {static_cast<double>(link.latency.count()) * 1e-3, link.bytes_per_second};
}

std::string link_words(const comm::SlowLinks& links) {
  if (links.hosts == 1) return words_for(links.link);
  return fmt::format("{} between {} hosts and {} inside", words_for(links.link), links.hosts, words_for(links.intra));
}

StepPlan plan_step(const PlannedRun& run, const LinkedMachine& machine) {
  const std::optional<LinkSpec> intra =
      machine.links.hosts > 1 ? std::optional(spec_of(machine.links.intra)) : std::nullopt;
  return plan_step(
      run.plan, run.strategy,
      simulate(linked_cluster(spec_of(machine.links.link), intra, machine.links.hosts, machine.ranks, machine.machine),
               machine.ranks));
}

StepParts parts_of(const StepPlan& step, const LinkedMachine& machine) {
  return cut_step(step.begin_ns, step.end_ns, step.events, record_of(step, machine));
}

LinkedMachine calibrated(LinkedMachine machine, const PlannedRun& from, const PlannedRun& to, double measured_ms) {
  double simulated_ms = 0;
  for (const PlannedRun* run : {&from, &to}) {
    const StepParts parts = parts_of(plan_step(*run, machine), machine);
    simulated_ms += parts.compute + parts.optimizer;
  }
  if (measured_ms > 0 && simulated_ms > 0) {
    machine.machine.flops *= simulated_ms / measured_ms;
    machine.machine.bytes_per_second *= simulated_ms / measured_ms;
  }
  return machine;
}

std::vector<WhyHelp> what_helps(const PlannedRun& from, const PlannedRun& to, const LinkedMachine& machine) {
  const auto of_links = [](auto change) {
    return [change](TrainPlan&, std::string&, LinkedMachine& m) {
      change(m.links.link);
      change(m.links.intra);
    };
  };
  const auto of_strategy = [](const char* name) {
    return [name](TrainPlan&, std::string& strategy, LinkedMachine&) { strategy = name; };
  };
  const std::array<std::pair<const char*, Change>, 6> changes = {{
      {"as it is", [](TrainPlan&, std::string&, LinkedMachine&) {}},
      {"no latency", of_links([](comm::SlowLink& link) { link.latency = {}; })},
      {"double rate", of_links([](comm::SlowLink& link) { link.bytes_per_second *= 2; })},
      {"--reshard-after-forward false",
       [](TrainPlan& plan, std::string&, LinkedMachine&) { plan.options.reshard_after_forward = "false"; }},
      {"zero2", of_strategy("zero2")},
      {"hsdp", of_strategy("hsdp")},
  }};
  std::vector<WhyHelp> helps;
  for (const auto& [name, change] : changes) {
    const std::optional<WhyHelp> help = help_of(from, to, machine, name, change);
    if (!help) continue;
    const bool same = !helps.empty() && help->step_ms == helps.front().step_ms &&
                      help->gap_ms == helps.front().gap_ms && help->peak_bytes == helps.front().peak_bytes;
    if (!same) helps.push_back(*help);
  }
  return helps;
}

void require_equal_steps(const PlannedRun& run) {
  const int period = sync_period(engine_options(run.plan, run.strategy).strategy);
  if (period > 1)
    throw base::InvalidUsage(
        fmt::format("--why: {} synchronizes its replicas after every {} steps, and no step is like the others; give "
                    "--sync-every 1, or another strategy",
                    run.name, period));
}

Why planned_why(const PlannedRun& from, const PlannedRun& to, const LinkedMachine& machine) {
  const StepParts a = parts_of(plan_step(from, machine), machine);
  const StepParts b = parts_of(plan_step(to, machine), machine);
  Why why = explain_gap({&a, 1}, {&b, 1});
  why.from = from.name;
  why.to = to.name;
  why.link = link_words(machine.links);
  why.helps = what_helps(from, to, machine);
  return why;
}

}  // namespace tessera::tools
