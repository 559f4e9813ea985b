// The facts of one step under one strategy: what `explain` shows, as text or as JSON.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/explain/options.h"
#include "tools/explain/real_step.h"
#include "tools/explain/story.h"
#include "tools/explain/wrapping.h"

namespace tessera::tools {

/// The operations of one kind over one number of ranks, in a step of one rank.
struct OperationCost {
  comm::OpKind kind = comm::OpKind::all_gather;
  int ranks = 1;
  std::uint64_t calls = 0;
  std::uint64_t bytes_sent = 0;
  std::uint64_t bytes = 0;                         ///< of the larger buffers
  std::vector<std::pair<std::string, int>> units;  ///< how often each unit
};

/// What a step costs one rank.
struct StepCost {
  std::vector<OperationCost> operations;  ///< of parameters and gradients
  std::uint64_t calls = 0, bytes_sent = 0;
  std::uint64_t formula_bytes = 0;  ///< of docs/comparison.md, for a step of the mean
  std::int64_t link_ns = 0;         ///< of all operations, from first byte to end
  std::int64_t exposed_ns = 0;
};

/// One step, simulated, and perhaps run.
struct Explanation {
  std::string title;    ///< model, strategy, ranks, batch
  std::string machine;  ///< whose times these are
  TrainPlan plan;
  StepPlan step;
  std::unique_ptr<Wrapping> wrapping;
  Story story;  ///< with the times of the real step, if there is one
  StepCost cost;
  std::string reference_name;         ///< the strategy that shards nothing
  std::optional<StepPlan> reference;  ///< its step; nothing for that strategy itself
  StepCost reference_cost;
  std::optional<RealStep> real;
  StepTimeline timeline;  ///< of the step in the story
};

/// Simulates the step of `options` under its strategy. `real`: the same step as it ran, if it did.
Explanation explain_step(const ExplainOptions& options, int ranks, std::optional<RealStep> real);

nlohmann::ordered_json to_json(const Explanation& explanation);

}  // namespace tessera::tools
