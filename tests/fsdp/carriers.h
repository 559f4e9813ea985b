// Trainings whose collectives run in collective plug-ins.
#pragma once

#include <gtest/gtest.h>

#include <utility>

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

/// The bytes that plug-ins report equal those that their communicators count. For TrainingSpec::after_step.
inline void stats_are_what_was_sent(int rank, int /*step*/, Engine& engine, nn::CausalModel& /*model*/) {
  engine.wait();
  const EngineTraffic traffic = engine.stats().traffic();
  for (const auto& [kind, sent] : {std::pair(comm::OpKind::all_gather, traffic.all_gather.bytes_sent),
                                   {comm::OpKind::reduce_scatter, traffic.reduce_scatter.bytes_sent},
                                   {comm::OpKind::all_reduce, traffic.all_reduce.bytes_sent}})
    EXPECT_EQ(engine.stats().collective_stats(kind).sent, sent) << comm::name_of(kind) << " of rank " << rank;
  EXPECT_THROW(static_cast<void>(engine.stats().collective_stats(comm::OpKind::barrier)), base::InvalidUsage);
}

inline Carriers everywhere(const std::string& name) { return {name, name, name}; }

}  // namespace tessera::fsdp
