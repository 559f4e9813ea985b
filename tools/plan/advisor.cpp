// tessera plan --advise: advise() of model_plan.h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/fsdp/wrap.h"
#include "tools/cli/output.h"
#include "tools/plan/model_plan.h"
#include "tools/train/model_task.h"

namespace tessera::tools {

using base::InvalidUsage;
using nlohmann::ordered_json;

std::string Candidate::command_line() const {
  const StepOptions& o = options;
  std::string text = "--strategy " + strategy;
  if (!o.mesh.empty()) text += " --mesh " + o.mesh;
  if (o.wrap != "block") text += " --wrap \"" + o.wrap + "\"";
  if (!o.reshard_after_forward.empty()) text += " --reshard-after-forward " + o.reshard_after_forward;
  if (o.prefetch != 1) text += fmt::format(" --prefetch {}", o.prefetch);
  if (o.checkpoint_activations) text += " --checkpoint-activations";
  if (o.accumulate != 1) text += fmt::format(" --accumulate {}", o.accumulate);
  return text;
}

namespace {

/// Units of one, two and four blocks, and the whole model as one unit. Blocks are the modules of "block".
std::vector<std::string> wraps_of(const TrainPlan& plan) {
  nn::Context context;
  const auto task = make_task(plan, context);
  std::vector<std::string> blocks;
  for (const fsdp::UnitSpec& unit : fsdp::make_units(task->model().root(), "block"))
    if (!unit.is_root) blocks.push_back(unit.name);
  std::vector<std::string> wraps = {"block"};
  for (const std::size_t size : {2, 4}) {
    if (blocks.size() < 2 * size) continue;
    std::string wrap;
    for (std::size_t i = 0; i < blocks.size(); ++i) wrap += (i == 0 ? "" : i % size == 0 ? ";" : "+") + blocks[i];
    wraps.push_back(std::move(wrap));
  }
  wraps.emplace_back("none");
  return wraps;
}

/// The meshes to try for a strategy: "" for the default, and others with 2, 4, ... shards if it has two axes.
std::vector<std::string> meshes_of(const std::string& strategy, int ranks) {
  std::vector<std::string> meshes = {""};
  if (strategy != "hsdp") return meshes;
  for (int shards = 2; shards < ranks; shards *= 2)
    if (ranks % shards == 0) meshes.push_back(fmt::format("{}x{}", ranks / shards, shards));
  return meshes;
}

class Search {
 public:
  Search(const PlanOptions& options, int ranks, const ClusterSpec& cluster)
      : options_(options), ranks_(ranks), cluster_(cluster), simulated_(simulate(cluster, ranks)) {}

  std::vector<Candidate> run() {
    const std::vector<std::string> wraps = options_.wrap != "block"
                                               ? std::vector{options_.wrap}
                                               : wraps_of(train_plan(options_, options_.wrap, ranks_, cluster_));
    for (const bool checkpoint : {false, true})
      for (const std::int64_t accumulate : {1, 2, 4, 8}) {
        if (options_.global_batch % (ranks_ * accumulate) != 0) continue;
        for (const std::string& wrap : wraps) try_strategies(wrap, checkpoint, accumulate);
      }
    return std::move(found_);
  }

 private:
  void try_strategies(const std::string& wrap, bool checkpoint, std::int64_t accumulate) {
    PlanOptions one = options_;
    one.checkpoint_activations = checkpoint;
    one.accumulate = accumulate;
    TrainPlan plan = train_plan(one, wrap, ranks_, cluster_);
    std::set<std::pair<std::string, std::string>> seen;  // of strategy and resolved mesh
    for (const std::string& strategy : strategies())
      for (const std::string& mesh : meshes_of(strategy, ranks_)) {
        plan.options.mesh = mesh;
        std::optional<fsdp::EngineOptions> engine = runnable(plan, strategy);
        if (!engine) continue;
        const int shards = engine->mesh->size_of(fsdp::kShardAxis);
        if (!seen.emplace(strategy, std::to_string(shards)).second) continue;
        try_unshards(plan, strategy, *engine);
      }
  }

  /// Prefetch and resharding matter only where parameters are unsharded in forward.
  void try_unshards(TrainPlan plan, const std::string& strategy, const fsdp::EngineOptions& engine) {
    const bool unshards = !engine.strategy.param_at_rest.empty() && engine.mesh->size_of(fsdp::kShardAxis) > 1;
    for (const char* reshard : {"", "false"})
      for (const int prefetch : {1, 2}) {
        if (!unshards && (prefetch != 1 || *reshard != '\0')) continue;
        plan.options.reshard_after_forward = reshard;
        plan.options.prefetch = prefetch;
        found_.push_back({strategy, plan.options, plan_step(plan, strategy, simulated_)});
      }
  }

  std::vector<std::string> strategies() const {
    if (!options_.strategies.empty()) return options_.strategies;
    return {kDefaultStrategies.begin(), kDefaultStrategies.end()};
  }
  std::optional<fsdp::EngineOptions> runnable(const TrainPlan& plan, const std::string& strategy) const {
    try {
      return engine_options(plan, strategy);
    } catch (const InvalidUsage&) {
      if (!options_.strategies.empty() && plan.options.mesh.empty()) throw;
      return {};
    }
  }

  const PlanOptions& options_;
  const int ranks_;
  const ClusterSpec& cluster_;
  const SimulatedCluster simulated_;
  std::vector<Candidate> found_;
};

/// Those that no other beats in both memory and time, by rising memory.
std::vector<Candidate> pareto_of(std::vector<Candidate> all) {
  std::ranges::stable_sort(all, {}, [](const Candidate& one) { return std::pair(one.peak_bytes(), one.step_ms()); });
  std::vector<Candidate> best;
  for (Candidate& one : all)
    if (best.empty() || one.step_ms() < best.back().step_ms()) best.push_back(std::move(one));
  return best;
}

/// The smallest power-of-two multiple of `ranks` with which fully sharded training fits, if there is one.
std::optional<int> enough_ranks(const PlanOptions& options, int ranks, const ClusterSpec& cluster, double memory) {
  ClusterSpec larger = cluster;
  larger.hosts = 0;
  for (int more = 2 * ranks; more <= 16 * ranks && more <= 1 << 16; more *= 2) {
    PlanOptions one = options;
    one.global_batch = options.global_batch * (more / ranks);
    one.checkpoint_activations = true;
    const TrainPlan plan = train_plan(one, "block", more, larger);
    if (static_cast<double>(plan_step(plan, "fsdp", simulate(larger, more)).result.peak_bytes.total_peak) <= memory)
      return more;
  }
  return {};
}

[[noreturn]] void refuse(const PlanOptions& options, int ranks, const ClusterSpec& cluster, double memory,
                         const Candidate& least) {
  const std::optional<int> enough = enough_ranks(options, ranks, cluster, memory);
  throw InvalidUsage(fmt::format(
      "plan --advise: {} fits in no way in {} per rank on {} ranks; the least is {} ({}); {}", options.model,
      human_bytes(memory), ranks, human_bytes(least.peak_bytes()), least.command_line(),
      enough ? fmt::format("use {} ranks with the same batch per rank, or a smaller --global-batch", *enough)
             : "use a smaller --global-batch or --seq-len, or ranks with more memory"));
}

constexpr std::size_t kSentences = 3;
/// Waits below this part of the step are not worth a sentence.
constexpr double kWorthwhile = 0.005;

/// The transfer whose end the wait waits for: the last one that is done in time.
const plan::TransferRecord* awaited(const StepPlan& plan, const base::TraceEvent& wait) {
  const plan::TransferRecord* found = nullptr;
  for (const auto* transfers : {&plan.in_flight, &plan.transfers})
    for (const plan::TransferRecord& transfer : *transfers)
      if (transfer.done_ns <= wait.end_ns && transfer.done_ns > wait.start_ns &&
          (found == nullptr || transfer.done_ns >= found->done_ns))
        found = &transfer;
  return found;
}

double ms(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

std::string sentence(const base::TraceEvent& wait, const plan::TransferRecord& transfer, std::int64_t tokens) {
  const std::string what = fmt::format("{}'s {}", wait.unit, comm::name_of(transfer.operation.kind));
  const std::int64_t duration = transfer.done_ns - transfer.begun_ns;
  const std::int64_t hidden = std::max<std::int64_t>(0, wait.start_ns - transfer.called_ns);
  std::string text = fmt::format("{} is exposed by {:.3g} ms: ", what, ms(wait.duration_ns()));
  if (transfer.begun_ns > transfer.called_ns)
    text += fmt::format("it waits {:.3g} ms for its link and ", ms(transfer.begun_ns - transfer.called_ns));
  text += fmt::format("{}travels for {:.3g} ms", transfer.begun_ns > transfer.called_ns ? "" : "it ", ms(duration));
  if (hidden == 0) return text + ", and nothing computes beside it.";
  const double needed = static_cast<double>(tokens) * static_cast<double>(transfer.done_ns - transfer.called_ns) /
                        static_cast<double>(hidden);
  return text + fmt::format(", and {} tokens per rank compute for {:.3g} ms beside it; {:.0f} would hide it.", tokens,
                            ms(hidden), std::ceil(needed / 10) * 10);
}

/// Sentences about the longest waits of the step: how long, beside what, and from how many tokens on the transfer would
/// be hidden. `tokens`: of a rank in a microbatch.
std::vector<std::string> exposure_sentences(const StepPlan& plan, std::int64_t tokens) {
  std::vector<const base::TraceEvent*> waits;
  for (const base::TraceEvent& event : plan.events)
    if (is_wait(event) && ms(event.duration_ns()) > kWorthwhile * plan.result.step_ms_median) waits.push_back(&event);
  std::ranges::stable_sort(waits, std::greater<>(), &base::TraceEvent::duration_ns);
  std::vector<std::string> sentences;
  for (const base::TraceEvent* wait : waits) {
    if (sentences.size() == kSentences) break;
    const plan::TransferRecord* transfer = awaited(plan, *wait);
    if (transfer != nullptr) sentences.push_back(sentence(*wait, *transfer, tokens));
  }
  if (sentences.empty() && plan.result.exposed_communication_ms <= kWorthwhile * plan.result.step_ms_median)
    sentences.emplace_back("Communication is hidden behind computation, but for less than 0.5 % of the step.");
  return sentences;
}

std::vector<std::string> reasons_for(const Candidate& best, const std::vector<Candidate>& all, const Advice& advice,
                                     std::int64_t tokens) {
  std::vector<std::string> reasons;
  const auto order = [&](const Candidate& one) {
    return std::pair(!advice.has_room_for(one), advice.has_room_for(one) ? one.step_ms() : one.peak_bytes());
  };
  const Candidate* ddp = nullptr;  // the fastest that fits, else the one that needs least memory
  for (const Candidate& one : all)
    if (one.strategy == "ddp" && (ddp == nullptr || order(one) < order(*ddp))) ddp = &one;
  if (ddp != nullptr && best.strategy != "ddp")
    reasons.push_back(
        advice.has_room_for(*ddp)
            ? fmt::format("ddp fits too ({}), but takes {:.1f} ms instead of {:.1f}: {:.1f} of them wait for "
                          "communication, and every rank updates all parameters.",
                          human_bytes(ddp->peak_bytes()), ddp->step_ms(), best.step_ms(),
                          ddp->plan.result.exposed_communication_ms)
            : fmt::format("ddp needs at least {}, more than the {} of a rank: the state must be sharded.",
                          human_bytes(ddp->peak_bytes()), human_bytes(advice.memory_bytes)));
  if (best.strategy == "ddp")
    reasons.push_back(fmt::format("ddp fits ({}) and is fastest: sharding would save memory that is not needed.",
                                  human_bytes(best.peak_bytes())));
  if (best.options.checkpoint_activations)
    reasons.emplace_back("Activations are recomputed because without that nothing as fast fits.");
  std::ranges::move(exposure_sentences(best.plan, tokens), std::back_inserter(reasons));
  return reasons;
}

std::vector<std::string> row_of(const Candidate& one) {
  const RunResult& run = one.plan.result;
  return {one.command_line(),
          mesh_text(run),
          human_bytes(one.peak_bytes()),
          fmt::format("{:.3f}", one.step_ms()),
          fmt::format("{:.3f}", run.exposed_communication_ms),
          fmt::format("{:.0f}", run.tokens_per_second),
          one.plan.mfu ? fmt::format("{:.1f}%", 100 * *one.plan.mfu) : "-"};
}

}  // namespace

Advice advise(const PlanOptions& options, int ranks, const ClusterSpec& cluster) {
  const TrainPlan plan = train_plan(options, options.wrap, ranks, cluster);
  Advice advice{.model = options.model, .parameters = plan.parameters, .ranks = ranks, .cluster = cluster.name};
  advice.memory_bytes = options.memory.empty() ? cluster.compute.memory_bytes : parse_bytes(options.memory, "--memory");
  const std::vector<Candidate> all = Search(options, ranks, cluster).run();
  advice.tried = all.size();
  std::vector<Candidate> fitting;
  std::ranges::copy_if(all, std::back_inserter(fitting),
                       [&](const Candidate& one) { return advice.has_room_for(one); });
  if (fitting.empty())
    refuse(options, ranks, cluster, advice.memory_bytes, *std::ranges::min_element(all, {}, &Candidate::peak_bytes));
  advice.pareto = pareto_of(std::move(fitting));
  const std::int64_t tokens = options.global_batch / ranks * plan.seq_len / advice.pareto.back().options.accumulate;
  advice.reasons = reasons_for(advice.pareto.back(), all, advice, tokens);
  return advice;
}

std::string to_text(const Advice& advice) {
  std::vector<std::vector<std::string>> rows = {
      {"fastest for its memory", "mesh", "peak", "step ms", "exposed", "tokens/s", "MFU"}};
  for (const Candidate& one : advice.pareto) rows.push_back(row_of(one));
  std::string text = fmt::format("{}: {} parameters, {} ranks of cluster {}{}; {} combinations simulated\n{}",
                                 advice.model, advice.parameters, advice.ranks, advice.cluster,
                                 advice.memory_bytes > 0 ? ", " + human_bytes(advice.memory_bytes) + " per rank" : "",
                                 advice.tried, text_table(rows));
  text += "take: " + advice.pareto.back().command_line() + "\n";
  for (const std::string& reason : advice.reasons) text += "why: " + reason + "\n";
  return text;
}

ordered_json to_json(const Advice& advice) {
  const auto json_of = [](const Candidate& one) {
    return ordered_json{{"options", one.command_line()},
                        {"strategy", one.strategy},
                        {"mesh", one.plan.result.mesh},
                        {"wrap", one.options.wrap},
                        {"reshard_after_forward", one.options.reshard_after_forward},
                        {"prefetch", one.options.prefetch},
                        {"checkpoint_activations", one.options.checkpoint_activations},
                        {"accumulate", one.options.accumulate},
                        {"peak_bytes", one.plan.result.peak_bytes.total_peak},
                        {"step_ms", one.step_ms()},
                        {"exposed_communication_ms", one.plan.result.exposed_communication_ms},
                        {"tokens_per_second", one.plan.result.tokens_per_second},
                        {"mfu", one.plan.mfu ? ordered_json(*one.plan.mfu) : ordered_json(nullptr)}};
  };
  return {{"model", advice.model},
          {"parameters", advice.parameters},
          {"ranks", advice.ranks},
          {"cluster", advice.cluster},
          {"memory_bytes", advice.memory_bytes > 0 ? ordered_json(advice.memory_bytes) : ordered_json(nullptr)},
          {"tried", advice.tried},
          {"pareto", each_of(advice.pareto, json_of)},
          {"best", json_of(advice.pareto.back())},
          {"reasons", advice.reasons}};
}

}  // namespace tessera::tools
