// Records the last steps of a rank over time, for pictures.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tools/report/step_timeline.h"

namespace tessera::tools {

/// While it lives, the memory tracker keeps each change. One per rank; one thread at a time.
class StepRecorder {
 public:
  explicit StepRecorder(base::MemoryTracker& memory_tracker);
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;

  void begin_step();
  void end_step(std::int64_t step, const std::vector<base::TraceEvent>& events);

  /// Of the kept steps the one whose length, on its slowest rank, is the median; without the first two of the run,
  /// which warm up caches, if there are others. Collective; needs a step.
  report::StepTimeline gather(comm::HostCollectives& control) const;

 private:
  struct Step {
    std::int64_t number = 0, begin_ns = 0, end_ns = 0;
    std::vector<base::TraceEvent> events;
    base::MemoryHistory memory;
  };
  base::MemoryTracker& memory_tracker_;
  std::int64_t begin_ns_ = 0;
  std::deque<Step> steps_;  // the last ones
};

}  // namespace tessera::tools
