#include "tools/explain/explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/plan/model_plan.h"
#include "tools/train/step_recorder.h"

namespace tessera::tools {
namespace {

using base::TraceEvent;
using nlohmann::ordered_json;

constexpr int kMostRanks = 8;  // that pictures show

/// The strategy that shards nothing, with which the others are compared.
std::string unsharded_strategy() {
  for (const std::string& name : fsdp::strategy_names())
    if (const fsdp::Strategy strategy = fsdp::strategy_named(name);
        strategy.optimizer.empty() && fsdp::periodic_axis(strategy).empty())
      return name;
  throw base::InvalidUsage("explain: every strategy shards");
}

StepCost cost_of(const TrainPlan& plan, const std::string& strategy, const StepPlan& step) {
  StepCost cost;
  std::set<std::string> units;
  std::vector<std::pair<std::int64_t, std::int64_t>> busy;
  for (const fsdp::UnitStats& unit : step.result.units) units.insert(unit.name);
  for (const plan::TransferRecord& transfer : step.transfers) {
    busy.emplace_back(transfer.begun_ns, transfer.done_ns);
    if (units.count(transfer.label) == 0) continue;  // order checks and norms
    const plan::SimulatedOp& operation = transfer.operation;
    auto same = std::ranges::find_if(cost.operations, [&](const OperationCost& other) {
      return other.kind == operation.kind && other.ranks == operation.ranks;
    });
    if (same == cost.operations.end())
      same = cost.operations.insert(same, {.kind = operation.kind, .ranks = operation.ranks});
    ++same->calls;
    same->bytes_sent += operation.bytes_sent;
    same->bytes += operation.bytes;
    auto unit = std::ranges::find(same->units, transfer.label, &std::pair<std::string, int>::first);
    if (unit == same->units.end()) unit = same->units.insert(unit, {transfer.label, 0});
    ++unit->second;
    ++cost.calls;
    cost.bytes_sent += operation.bytes_sent;
  }
  cost.link_ns = covered_ns(std::move(busy));
  cost.exposed_ns = exposed_ns(step.events);
  const fsdp::EngineOptions engine = engine_options(plan, strategy);
  const fsdp::TrafficVolume formula =
      fsdp::communication_formula(engine.strategy, step.mesh, step.unit_sizes, plan.precision,
                                  step_shape_of(plan.options), engine.collectives)
          .bytes;
  cost.formula_bytes = formula.all_gather + formula.reduce_scatter + formula.all_reduce;
  return cost;
}

/// `timed`: the simulation knows how long the model computes.
std::string machine_of(const ExplainOptions& options, bool timed) {
  const std::string simulated =
      !options.cluster.empty() ? "cluster " + options.cluster
      : options.hosts == 1     ? fmt::format("{} a rank, link {}", options.machine, options.link)
                           : fmt::format("{} a rank, {} hosts, link {}{}", options.machine, options.hosts, options.link,
                                         options.link_intra.empty() ? "" : ", inside a host " + options.link_intra);
  if (!timed) return "times are this machine's; COST counts the calls of a simulated step";
  return options.run ? "times in STEP are this machine's; COST is simulated: " + simulated
                     : "times are simulated: " + simulated + "; --run measures on this machine";
}

/// The simulated step of the first ranks, which are all equal: what pages show of many. `length_ns`: of the step.
StepTimeline simulated_timeline(const StepPlan& step, std::int64_t length_ns) {
  StepTimeline timeline{.step = 1, .length_ns = length_ns, .simulated = true};
  RankTimeline rank{.events = step.events, .memory = samples_of(step.step_memory, step.begin_ns, kMostSamples)};
  for (base::TraceEvent& event : rank.events) {
    event.start_ns -= step.begin_ns;
    event.end_ns -= step.begin_ns;
  }
  const std::vector<base::TransferEvent> transfers = transfer_events(step);
  const std::vector<std::optional<std::size_t>> started = starting_events(step);
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    if (!started[i]) continue;
    Transfer& added = rank.transfers.emplace_back(Transfer{transfers[i], *started[i]});
    for (std::int64_t* const time : {&added.times.called_ns, &added.times.begun_ns, &added.times.done_ns})
      *time -= step.begin_ns;
  }
  for (rank.rank = 0; rank.rank < std::min(kMostRanks, step.mesh.size()); ++rank.rank) {
    for (base::TraceEvent& event : rank.events) event.rank = rank.rank;
    for (Transfer& transfer : rank.transfers) transfer.times.rank = rank.rank;
    timeline.ranks.push_back(rank);
  }
  return timeline;
}

bool same_structure(const std::vector<TraceEvent>& a, const std::vector<TraceEvent>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const TraceEvent& one, const TraceEvent& other) {
    return one.kind == other.kind && one.unit == other.unit && one.bytes == other.bytes;
  });
}

/// `timed`: with the times of the simulation.
ordered_json json_of(const StepCost& cost, bool timed) {
  ordered_json operations = ordered_json::array();
  for (const OperationCost& each : cost.operations)
    operations.push_back({{"operation", comm::name_of(each.kind)},
                          {"ranks", each.ranks},
                          {"calls", each.calls},
                          {"bytes_sent", each.bytes_sent},
                          {"bytes", each.bytes}});
  ordered_json json = {{"operations", operations},
                       {"calls", cost.calls},
                       {"bytes_sent", cost.bytes_sent},
                       {"formula_bytes", cost.formula_bytes}};
  if (timed) {
    json["link_ms"] = static_cast<double>(cost.link_ns) / 1e6;
    json["exposed_ms"] = static_cast<double>(cost.exposed_ns) / 1e6;
  }
  return json;
}

ordered_json json_of(const Wrapping& wrapping, const fsdp::MeshShape& mesh) {
  ordered_json units = ordered_json::array();
  for (const WrappedUnit& unit : wrapping.units()) {
    ordered_json shards = ordered_json::array();
    for (const Shard& shard : shards_of(unit, unit.strategy.optimizer, mesh))
      shards.push_back({{"ranks", shard.ranks}, {"begin", shard.range.begin}, {"end", shard.range.end}});
    units.push_back(
        {{"name", unit.name},
         {"parameters", unit.elements},
         {"padded", unit.padded},
         {"bytes", unit.bytes},
         {"bytes_at_rest", unit.bytes / static_cast<std::uint64_t>(parts_over(unit.strategy.param_at_rest, mesh))},
         {"contents", unit.contents},
         {"shards", shards}});
  }
  return units;
}

ordered_json json_of(const Story& story) {
  ordered_json rows = ordered_json::array();
  for (const StoryRow& row : story.rows) {
    ordered_json one = {{"event", base::name_of(row.kind)},
                        {"unit", row.unit},
                        {"at_ms", static_cast<double>(row.at_ns) / 1e6},
                        {"text", row.text},
                        {"note", row.note}};
    if (row.sent) one["sent_bytes"] = *row.sent;
    if (row.unsharded) one["unsharded_bytes"] = *row.unsharded;
    if (row.wait_ns) one["wait_ms"] = static_cast<double>(*row.wait_ns) / 1e6;
    rows.push_back(std::move(one));
  }
  return rows;
}

ordered_json json_of(const RealStep& real) {
  ordered_json ranks = ordered_json::array();
  for (const RankValues& rank : real.ranks) {
    ordered_json units = ordered_json::array();
    for (const UnitValues& unit : rank.units)
      units.push_back({{"name", unit.name},
                       {"weights_hash", unit.weights_hash},
                       {"gradient_norm", unit.gradient_norm},
                       {"shard_first", unit.shard.first},
                       {"shard_elements", unit.shard.elements},
                       {"shard_norm", unit.shard.norm()}});
    ranks.push_back({{"loss", rank.loss}, {"units", units}});
  }
  ordered_json norms = ordered_json::object();
  for (std::size_t i = 0; i < real.ranks.front().units.size(); ++i)
    if (const std::optional<double> norm = whole_norm(real, i)) norms[real.ranks.front().units[i].name] = *norm;
  return {{"ranks", ranks}, {"norms", norms}, {"step_ms", static_cast<double>(real.step_ns) / 1e6}};
}

}  // namespace

std::string step_title(const TrainPlan& plan, const std::string& strategies, const std::string& mesh) {
  const std::int64_t microbatches = plan.options.accumulate;
  return fmt::format("{}, {} parameters, {} on {} rank{}{}, {} sequences of {}{}, {}, {}", plan.options.model,
                     with_commas(plan.parameters), strategies, plan.ranks, plan.ranks == 1 ? "" : "s", mesh,
                     plan.options.global_batch, plan.seq_len,
                     microbatches == 1 ? "" : fmt::format(" in {} microbatches", microbatches),
                     base::name_of(plan.precision.compute), plan.options.optimizer);
}

Explanation explain_step(const ExplainOptions& options, int ranks, std::optional<RealStep> real) {
  Explanation result;
  const ClusterSpec cluster = cluster_of(options, ranks);
  const SimulatedCluster simulated = simulate(cluster, ranks);
  result.plan = train_plan(options, options.wrap, ranks, cluster, real.has_value());
  result.step = plan_step(result.plan, options.strategy, simulated, {}, {.isolated = true, .step_memory = true});
  const RunResult& run = result.step.result;
  result.title = step_title(result.plan, run.strategy, " (mesh " + mesh_text(run) + ")");
  result.machine = machine_of(options, result.plan.can_be_simulated);
  result.wrapping = std::make_unique<Wrapping>(result.plan, result.step);
  result.cost = cost_of(result.plan, options.strategy, result.step);
  result.reference_name = unsharded_strategy();
  if (result.step.result.strategy != result.reference_name) {
    TrainPlan plain = result.plan;  // without options that are about shards
    plain.options.reshard_after_forward.clear();
    plain.options.collectives.clear();
    plain.options.cpu_offload = false;
    result.reference = plan_step(plain, result.reference_name, simulated, {}, {.isolated = true});
    result.reference_cost = cost_of(plain, result.reference_name, *result.reference);
  }
  const StepPlan& step = result.step;
  std::vector<IssuedTransfers> issued = issued_transfers(step);
  StoryInput input{.wrapping = *result.wrapping, .events = step.events, .issued = issued, .mesh = step.mesh};
  input.begin_ns = step.begin_ns;
  input.step_ns = std::llround(step.result.step_ms_median * 1e6);
  result.real = std::move(real);
  if (result.real) {
    if (!same_structure(step.events, result.real->events))
      throw CheckFailed("explain: the events of the real step are not those of the simulated one");
    input.events = result.real->events;
    for (IssuedTransfers& each : issued) each.called_ns = each.queued_ns = 0;  // as simulated
    input.begin_ns = result.real->begin_ns;
    input.step_ns = result.real->step_ns;
  }
  result.story = make_story(input);
  result.timeline = result.real ? result.real->timeline : simulated_timeline(step, input.step_ns);
  add_state(result.timeline, result.plan, engine_options(result.plan, options.strategy).strategy, step.mesh);
  return result;
}

ordered_json to_json(const Explanation& explanation) {
  const StepPlan& step = explanation.step;
  const bool timed = explanation.plan.can_be_simulated;
  ordered_json json = {{"title", explanation.title},
                       {"strategy", step.result.strategy},
                       {"mesh", step.result.mesh},
                       {"ranks", explanation.plan.ranks},
                       {"units", json_of(*explanation.wrapping, step.mesh)},
                       {"model_state_bytes", to_json(step.result.model_state_bytes)},
                       {"peak_unsharded_bytes", explanation.story.most_unsharded},
                       {"step_ms", static_cast<double>(explanation.story.step_ns) / 1e6},
                       {"rows", json_of(explanation.story)},
                       {"timeline", to_json(explanation.timeline)},
                       {"cost", json_of(explanation.cost, timed)}};
  if (explanation.reference) {
    json["reference"] = {{"strategy", explanation.reference_name},
                         {"model_state_bytes", to_json(explanation.reference->result.model_state_bytes)},
                         {"cost", json_of(explanation.reference_cost, timed)}};
    if (timed) json["reference"]["step_ms"] = explanation.reference->result.step_ms_median;
  }
  if (explanation.real) json["values"] = json_of(*explanation.real);
  return json;
}

}  // namespace tessera::tools
