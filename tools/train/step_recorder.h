// Records the last steps of a rank over time, and gathers those of all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/host_collectives.h"
#include "tools/results/step_timeline.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The largest value of any rank, in each place. Collective.
template <class Value>
std::vector<Value> largest(comm::HostCollectives& control, const std::vector<Value>& own) {
  std::vector<Value> most(own.size(), 0);
  for (const auto& rank : control.gather_all(own))
    for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], rank[i]);
  return most;
}

/// What all ranks give, by rank, on every rank. Collective.
std::vector<nlohmann::json> gather_json(comm::HostCollectives& control, const nlohmann::ordered_json& own);

/// Returns the events of all ranks, by rank. Collective.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own);

/// A step of one rank.
struct RecordedStep {
  std::int64_t number = 0, begin_ns = 0, end_ns = 0;
  std::vector<base::TraceEvent> events;
  base::MemoryHistory memory;
};

/// The step of all ranks, without pieces and formula. Collective.
StepTimeline gather_step(comm::HostCollectives& control, const RecordedStep& own);

/// Adds what depends on the strategy: how it shards units, and ZeRO's formula, if it applies.
void add_state(StepTimeline& timeline, const TrainPlan& plan, const fsdp::Strategy& strategy,
               const fsdp::MeshShape& mesh);

/// While it lives, the memory tracker keeps each change. One per rank; one thread at a time.
class StepRecorder {
 public:
  explicit StepRecorder(base::MemoryTracker& memory_tracker) : memory_tracker_(memory_tracker) {
    memory_tracker.keep_history(true);
  }
  ~StepRecorder() { memory_tracker_.keep_history(false); }
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void begin_step() { begin_ns_ = base::host_time_ns(); }
  void end_step(std::int64_t step, const std::vector<base::TraceEvent>& events);

  /// Of the kept steps the one whose length, on its slowest rank, is the median; without the first two of the run,
  /// which warm up caches, if there are others. Collective; needs a step.
  StepTimeline gather(comm::HostCollectives& control) const;

 private:
  base::MemoryTracker& memory_tracker_;
  std::int64_t begin_ns_ = 0;
  std::deque<RecordedStep> steps_;  // the last ones
};

}  // namespace tessera::tools
