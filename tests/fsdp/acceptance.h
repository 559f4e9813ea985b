// Fixture of both acceptance test files: each property over shared memory and over sockets, on several worlds.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/fsdp/odd_model.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {

using base::DType;
using base::MemoryCategory;
using base::TraceEventKind;
using harness::engine_for;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;
using testing::HasSubstr;

inline const std::vector<std::string> kStrategies = {"ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"};

class Acceptance : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }

  TrainingSpec spec(const std::string& strategy) const {
    TrainingSpec spec;
    spec.backend = backend();
    spec.ranks = ranks();
    spec.global_batch = 2 * ranks();
    spec.model.layers = 3;
    spec.engine = engine_for(strategy);
    spec.engine.measure_norm = true;
    return spec;
  }
  /// The strategies that have a mesh for this world size.
  std::vector<std::string> strategies() const {
    std::vector<std::string> names = kStrategies;
    if (ranks() % 2 != 0) std::erase_if(names, [](const std::string& name) { return strategy_named(name).two_axes; });
    return names;
  }
};

inline auto acceptance_worlds() { return testing::Combine(testing::Values("shm", "tcp"), testing::Values(1, 2, 3, 4)); }

inline std::string acceptance_name(const testing::TestParamInfo<std::tuple<std::string, int>>& test) {
  return std::get<0>(test.param) + "_" + std::to_string(std::get<1>(test.param));
}

}  // namespace tessera::fsdp
