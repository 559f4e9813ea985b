// Trainings that the tests of the engine begin from, and what they read from engines.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/harness/training.h"

namespace tessera::fsdp {

using harness::engine_for;
using harness::TrainingSpec;

/// All strategies without a sync period. Those of two axes need an even number of ranks.
inline constexpr const char* kStrategies[] = {"ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"};

struct SpecOptions {
  int layers = 3;
  std::string mesh = {};
  double clip_norm = 0;
  base::DType dtype = base::DType::f32;  ///< of the model
  std::optional<base::DType> reduce_dtype = {};
};

/// Three steps of gpt-nano with two sequences per rank.
inline TrainingSpec base_spec(const std::string& strategy, int ranks = 2, const SpecOptions& options = {}) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.model.layers = options.layers;
  spec.dtype = options.dtype;
  spec.engine = engine_for(strategy, options.mesh);
  spec.engine.clip_norm = options.clip_norm;
  spec.engine.reduce_dtype = options.reduce_dtype;
  return spec;
}

/// Five steps of two blocks, with norms.
inline TrainingSpec five_step_spec(const std::string& strategy, int ranks) {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 2});
  spec.steps = 5;
  spec.engine.measure_norm = true;
  return spec;
}

/// Names of the collective plug-ins of a training.
struct PluginNames {
  std::string all_gather = "plain", reduce_scatter = "plain", all_reduce = "plain";
};

inline PluginNames all_collectives(const std::string& name) { return {name, name, name}; }

inline TrainingSpec plugin_spec(const std::string& strategy, int ranks, const PluginNames& plugins,
                                const std::string& mesh = "") {
  TrainingSpec spec = base_spec(strategy, ranks, {.layers = 2, .mesh = mesh});
  spec.engine.strategy.all_gather = plugins.all_gather;
  spec.engine.strategy.reduce_scatter = plugins.reduce_scatter;
  spec.engine.strategy.all_reduce = plugins.all_reduce;
  return spec;
}

/// The bytes that plug-ins report equal those that their communicators count. For TrainingSpec::after_step.
inline void expect_stats_equal_traffic(int rank, int /*step*/, Engine& engine, nn::CausalModel& /*model*/) {
  engine.wait();
  const EngineTraffic traffic = engine.stats().traffic();
  for (const auto& [kind, sent] : {std::pair(comm::OpKind::all_gather, traffic.all_gather.bytes_sent),
                                   {comm::OpKind::reduce_scatter, traffic.reduce_scatter.bytes_sent},
                                   {comm::OpKind::all_reduce, traffic.all_reduce.bytes_sent}})
    EXPECT_EQ(engine.stats().collective_stats(kind).sent, sent) << comm::name_of(kind) << " of rank " << rank;
  EXPECT_THROW(static_cast<void>(engine.stats().collective_stats(comm::OpKind::barrier)), base::InvalidUsage);
}

/// Of a model's own parameters, or of the engine's view of them.
inline constexpr auto is_attention = [](const auto& parameter) {
  return parameter.name().find(".attn.") != std::string::npos;
};

/// "forward h.0", ... of the given kinds, in the order of their begin.
inline std::vector<std::string> event_names(const std::vector<base::TraceEvent>& events,
                                            std::initializer_list<base::TraceEventKind> kinds) {
  std::vector<std::string> names;
  for (const base::TraceEvent& event : events)
    if (std::find(kinds.begin(), kinds.end(), event.kind) != kinds.end())
      names.push_back(std::string(base::name_of(event.kind)) + " " + event.unit);
  return names;
}

/// Parameters by name.
using Values = std::map<std::string, std::vector<float>>;

inline Values values_of(Engine& engine) {
  Values values;
  engine.state().for_each_parameter(
      [&](const fsdp::Parameter& p, std::span<const float> v) { values[p.name()].assign(v.begin(), v.end()); });
  return values;
}

/// Fixture of the acceptance tests: each property over shared memory and over sockets, on several worlds.
class Acceptance : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }

  TrainingSpec spec(const std::string& strategy) const {
    TrainingSpec spec = base_spec(strategy, ranks());
    spec.backend = backend();
    spec.engine.measure_norm = true;
    return spec;
  }
  /// The strategies that have a mesh for this world size.
  std::vector<std::string> strategies() const {
    std::vector<std::string> names(std::begin(kStrategies), std::end(kStrategies));
    if (ranks() % 2 != 0) std::erase_if(names, [](const std::string& name) { return strategy_named(name).two_axes; });
    return names;
  }
};

inline auto acceptance_worlds() { return testing::Combine(testing::Values("shm", "tcp"), testing::Values(1, 2, 3, 4)); }

inline std::string acceptance_name(const testing::TestParamInfo<std::tuple<std::string, int>>& test) {
  return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param));
}

}  // namespace tessera::fsdp
