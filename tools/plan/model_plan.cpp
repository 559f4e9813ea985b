#include "tools/plan/model_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tools/cli/output.h"

namespace tessera::tools {

using base::InvalidUsage;
using base::MemoryCategory;
using nlohmann::ordered_json;

namespace {

std::vector<std::string> row_of(const StepPlan& plan) {
  const RunResult& run = plan.result;
  const auto at_peak = [&](MemoryCategory use) { return run.peak_bytes.at_peak[static_cast<std::size_t>(use)]; };
  std::vector<std::string> row = {
      name_of(run),
      mesh_text(run),
      human_bytes(run.model_state_bytes.total()),
      human_bytes(at_peak(MemoryCategory::unsharded_parameter) + at_peak(MemoryCategory::unsharded_gradient)),
      human_bytes(at_peak(MemoryCategory::activation)),
      human_bytes(run.peak_bytes.total_peak)};
  std::ranges::move(traffic_texts(run), std::back_inserter(row));
  row.insert(row.end(),
             {fmt::format("{:.3f}", run.step_ms_median), fmt::format("{:.3f}", run.exposed_communication_ms),
              fmt::format("{:.0f}", run.tokens_per_second), plan.mfu ? fmt::format("{:.1f}%", 100 * *plan.mfu) : "-"});
  return row;
}

ordered_json graph_json(const plan::StepGraph& graph) {
  ordered_json nodes = ordered_json::array();
  for (const plan::StepNode& node : graph) {
    ordered_json& json = nodes.emplace_back();
    json = {{"name", node.label.empty() ? "work" : node.label},
            {"start_ns", node.start_ns},
            {"duration_ns", node.duration_ns},
            {"after", node.after}};
    if (node.operation) {
      const plan::SimulatedOp& operation = *node.operation;
      json["operation"] = {{"kind", name_of(operation.kind)},
                           {"bytes", operation.bytes},
                           {"bytes_sent", operation.bytes_sent},
                           {"stride", operation.members.stride},
                           {"ranks", operation.members.ranks}};
    }
    if (node.kernel) {
      const nn::ProductShape& product = node.kernel->product;
      json["kernel"] = {{"dtype", base::name_of(node.kernel->dtype)}, {"size", node.kernel->size}};
      if (product.count > 0) json["kernel"]["product"] = {product.m, product.n, product.k, product.count};
    }
  }
  return nodes;
}

/// Tokens per second and rank, as a part of those in the smallest world with this strategy and wrapping: the first
/// plan.
double efficiency(const std::vector<ModelPlan>& plans, const ModelPlan& plan, const RunResult& run) {
  for (const ModelPlan& smallest : plans)
    for (const StepPlan& step : smallest.runs)
      if (name_of(step.result) == name_of(run))
        return run.tokens_per_second / plan.ranks / (step.result.tokens_per_second / smallest.ranks);
  return 1;
}

std::string table_of(const std::vector<ModelPlan>& plans, const char* title) {
  std::vector<std::vector<std::string>> rows = {
      {"ranks", "strategy", "mesh", "step ms", "exposed", "tokens/s", "of ideal"}};
  for (const ModelPlan& plan : plans)
    for (const StepPlan& step : plan.runs) {
      const RunResult& run = step.result;
      rows.push_back({std::to_string(plan.ranks), name_of(run), mesh_text(run),
                      fmt::format("{:.3f}", run.step_ms_median), fmt::format("{:.3f}", run.exposed_communication_ms),
                      fmt::format("{:.0f}", run.tokens_per_second),
                      fmt::format("{:.1f}%", 100 * efficiency(plans, plan, run))});
    }
  return std::string(title) + "\n" + text_table(rows);
}

ordered_json json_of(const std::vector<ModelPlan>& plans) {
  ordered_json all = ordered_json::array();
  for (const ModelPlan& plan : plans) {
    ordered_json one = to_json(plan);
    for (std::size_t i = 0; i < plan.runs.size(); ++i)
      one["runs"][i]["efficiency"] = efficiency(plans, plan, plan.runs[i].result);
    all.push_back({{"ranks", plan.ranks}, {"runs", std::move(one["runs"])}});
  }
  return all;
}

}  // namespace

TrainPlan train_plan(const PlanOptions& options, const std::string& wrap, int ranks, const ClusterSpec& cluster,
                     bool untimed) {
  TrainOptions one{options};
  one.wrap = wrap;
  one.steps = 0;  // opens no data
  one.simulated = true;
  one.untimed = untimed;
  one.products = nn::Products::own;  // the memory of kernels does not depend on the processor that plans
  TrainPlan plan = make_plan(one, ranks);
  plan.ranks_per_host = std::min(ranks, cluster.ranks_per_host);
  plan.options.cpu_offload = options.cpu_offload && cluster.compute.kind == ComputeSpec::Kind::device;
  return plan;
}

ClusterSpec cluster_of(const PlanOptions& options, int ranks) {
  if (!options.cluster.empty()) return find_cluster(options.cluster);
  std::optional<LinkSpec> intra;
  if (!options.link_intra.empty()) {
    if (options.hosts == 1)
      throw InvalidUsage("--link-intra: with one host all links are those of --link; give --hosts too");
    intra = parse_link(options.link_intra, "--link-intra");
  }
  const LinkSpec link = parse_link(options.link, "--link");
  if (options.machine.find(',') != std::string::npos)
    return linked_cluster(link, intra, options.hosts, ranks, parse_machine(options.machine, "--machine"));
  const ClusterSpec machine = find_cluster(options.machine, "--machine is not FLOPS,BYTES, and");
  ClusterSpec cluster = linked_cluster(link, intra, options.hosts, ranks, {});
  cluster.name = machine.name + " over --link";
  cluster.compute = machine.compute;
  cluster.communicators = machine.communicators;
  cluster.measured = machine.measured;
  for (auto& [operation, tables] : cluster.measured)
    for (MeasuredCollective& table : tables) table.points.clear();  // what calls take from compute remains
  return cluster;
}

ModelPlan plan_model(const PlanOptions& options, int ranks, const ClusterSpec& cluster,
                     std::vector<std::string>* skipped) {
  const SimulatedCluster simulated = simulate(cluster, ranks);
  ModelPlan result{.model = options.model, .ranks = ranks, .cluster = cluster.name};
  result.memory_bytes = cluster.compute.memory_bytes;
  const std::optional<plan::Variation> variation = variation_of(options);
  const std::vector<std::string> wraps = options.wraps.empty() ? std::vector{options.wrap} : options.wraps;
  std::vector<TrainPlan> plans;
  for (const std::string& wrap : wraps) plans.push_back(train_plan(options, wrap, ranks, cluster));
  result.parameters = plans.front().parameters;
  result.note = plans.front().model.note;
  std::vector<std::string> left_out;
  for (const std::string& strategy : strategies_of(plans.front(), left_out))
    for (const TrainPlan& plan : plans) {
      result.runs.push_back(plan_step(plan, strategy, simulated, variation));
      if (!options.json.empty())  // of a step by itself
        result.runs.back().graph = plan_step(plan, strategy, simulated, {}, {.isolated = true, .graph = true}).graph;
      if (!options.wraps.empty()) result.runs.back().result.wrap = plan.options.wrap;
    }
  if (skipped != nullptr) *skipped = std::move(left_out);
  return result;
}

std::string to_text(const ModelPlan& plan) {
  std::vector<std::vector<std::string>> rows = {{"strategy", "mesh", "state", "unsharded", "activations", "peak",
                                                 "all_gather", "reduce_scatter", "all_reduce", "step ms", "exposed",
                                                 "tokens/s", "MFU"}};
  for (const StepPlan& run : plan.runs) rows.push_back(row_of(run));
  if (plan.memory_bytes > 0) {
    rows[0].push_back("fits");
    for (std::size_t i = 0; i < plan.runs.size(); ++i)
      rows[i + 1].push_back(static_cast<double>(plan.runs[i].result.peak_bytes.total_peak) <= plan.memory_bytes ? "yes"
                                                                                                                : "no");
  }
  return fmt::format(
             "{}: {} parameters, {} ranks of cluster {}, simulated. Memory is per rank, by kind at the peak; calls / "
             "bytes sent are per rank and step.\n",
             plan.model, plan.parameters, plan.ranks, plan.cluster) +
         text_table(rows);
}

ordered_json to_json(const ModelPlan& plan) {
  ordered_json runs = ordered_json::array();
  for (const StepPlan& planned : plan.runs) {
    ordered_json run = to_json(planned.result);
    for (const char* key : {"losses", "final_parameters_hash", "formula_bytes_per_step", "plain_bytes_per_step"})
      run.erase(key);
    run["mfu"] = planned.mfu ? ordered_json(*planned.mfu) : ordered_json(nullptr);
    for (std::size_t i = 0; i < base::kMemoryUses; ++i)
      run["bytes_at_peak"][std::string(base::name_of(static_cast<MemoryCategory>(i)))] =
          planned.result.peak_bytes.at_peak[i];
    if (!planned.rank_step_ms.empty()) run["rank_step_ms"] = planned.rank_step_ms;
    if (plan.memory_bytes > 0)
      run["fits"] = static_cast<double>(planned.result.peak_bytes.total_peak) <= plan.memory_bytes;
    if (!planned.graph.empty()) run["graph"] = graph_json(planned.graph);
    runs.push_back(std::move(run));
  }
  return {{"model", plan.model},
          {"parameters", plan.parameters},
          {"ranks", plan.ranks},
          {"cluster", plan.cluster},
          {"memory_bytes", plan.memory_bytes > 0 ? ordered_json(plan.memory_bytes) : ordered_json(nullptr)},
          {"runs", std::move(runs)}};
}

Scaling plan_scaling(const PlanOptions& options, int ranks, const ClusterSpec& cluster) {
  std::vector<int> worlds = scale_of(options);
  worlds.push_back(ranks);
  std::ranges::sort(worlds);
  worlds.erase(std::unique(worlds.begin(), worlds.end()), worlds.end());
  Scaling scaling;
  for (const int world : worlds) {
    PlanOptions strong = options;
    strong.json.clear();  // no graphs
    PlanOptions weak = strong;
    weak.global_batch = options.global_batch / ranks * world;
    scaling.weak.push_back(plan_model(weak, world, cluster, nullptr));
    try {
      scaling.strong.push_back(plan_model(strong, world, cluster, nullptr));
    } catch (const InvalidUsage& error) {
      scaling.skipped.push_back(fmt::format("{} ranks: {}", world, error.what()));
    }
  }
  return scaling;
}

std::string to_text(const Scaling& scaling) {
  std::string text = table_of(scaling.weak, "weak scaling: the same batch per rank") +
                     table_of(scaling.strong, "strong scaling: the same global batch");
  for (const std::string& reason : scaling.skipped) text += "left out of strong scaling: " + reason + "\n";
  return text;
}

ordered_json to_json(const Scaling& scaling) {
  return {{"weak", json_of(scaling.weak)}, {"strong", json_of(scaling.strong)}, {"skipped", scaling.skipped}};
}

}  // namespace tessera::tools
