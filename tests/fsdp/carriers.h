// Trainings whose collectives are carried by plug-ins.
#pragma once

#include "tests/harness/training.h"

namespace tessera::fsdp {

struct Carriers {
  std::string all_gather = "plain", reduce_scatter = "plain", all_reduce = "plain";
};

inline harness::TrainingSpec spec_for(const std::string& strategy, int ranks, const Carriers& carriers,
                                      const std::string& mesh = "") {
  harness::TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.engine = harness::engine_for(strategy, mesh);
  spec.engine.strategy.all_gather = carriers.all_gather;
  spec.engine.strategy.reduce_scatter = carriers.reduce_scatter;
  spec.engine.strategy.all_reduce = carriers.all_reduce;
  return spec;
}

inline Carriers everywhere(const std::string& name) { return {name, name, name}; }

}  // namespace tessera::fsdp
