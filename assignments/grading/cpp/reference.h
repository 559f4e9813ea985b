// The same training by the library's engine.
#pragma once

#include <functional>
#include <vector>

#include "grading/cpp/model.h"
#include "tessera/comm/communicator.h"

namespace grading {

inline constexpr int kSteps = 3;
inline constexpr float kLearningRate = 0.5F;

/// The block that a rank leaves out in a step; kBlocks: none.
using Skipped = std::function<std::size_t(int step, int rank)>;

/// What the library's engine computes under ddp.
struct Reference {
  std::vector<double> losses;
  std::vector<std::vector<float>> initial, first, final;  ///< parameters of each unit at first, after one step, at last
};

std::vector<std::vector<float>> parameters_of(Model& model);
Reference train_reference(tessera::comm::Communicator& world, const Skipped& skipped = {});

}  // namespace grading
