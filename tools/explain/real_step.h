// One step on real ranks: the values that show what the ranks share and what they don't, and its trace events.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/communicator.h"
#include "tools/results/step_timeline.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// A range of one unit's gradients with which a rank updates.
struct UnitGradient {
  std::string first;          ///< parameter, and its element, with which the range begins
  std::int64_t elements = 0;  ///< of parameters
  double sum_of_squares = 0;
  double norm() const;
};

/// The values of one unit on one rank.
struct UnitValues {
  std::string name;
  std::string weights_hash;  ///< of the parameters with which the first forward computed
  double gradient_norm = 0;  ///< of its own data, before the reduction; of the last microbatch
  UnitGradient shard;        ///< after the reduction: of the mean over the ranks
};

struct RankValues {
  double loss = 0;  ///< of its own sequences
  std::vector<UnitValues> units;
};

/// The first step of a training, and the last of three on which times were taken.
struct RealStep {
  std::vector<RankValues> ranks;
  std::vector<base::TraceEvent> events;  ///< of the last rank
  std::int64_t begin_ns = 0, step_ns = 0;
  StepTimeline timeline;  ///< of all ranks
};

/// The norm of a unit's whole gradient, from shards of which ranks may keep the same; nothing where ranks have
/// different values of one shard, since nothing was averaged.
std::optional<double> whole_norm(const RealStep& step, std::size_t unit);

/// Collective: every rank of `world` calls it. The result is complete on rank 0. `plan` has steps and data.
RealStep run_real_step(const TrainPlan& plan, comm::Communicator& world,
                       const std::shared_ptr<base::MemoryTracker>& memory_tracker);

}  // namespace tessera::tools
