// Assignment 3: a sharded optimizer (ZeRO-1). The handout is README.md beside this file.
#include "zero.h"

#include <algorithm>
#include <vector>

namespace assignment {
namespace {

using namespace tessera;

class Zero final : public ZeroOptimizer {
 public:
  Zero(comm::Communicator& world, std::span<float> parameters, double max_norm)
      : world_(world), parameters_(parameters), max_norm_(max_norm) {
    // TODO the counts of all ranks' slices, where this rank's slice begins, and memory for its state.
  }

  void step(std::span<const float> gradients) override {
    // TODO average the gradients: each rank gets those of its slice.
    // TODO if max_norm_ > 0: clip by the norm over all ranks.
    // TODO update the own slice by adamw(), then gather the slices of all ranks.
    ++steps_;
    (void)gradients;
  }

 private:
  comm::Communicator& world_;
  const std::span<float> parameters_;
  const double max_norm_;
  int steps_ = 0;
};

}  // namespace

std::unique_ptr<ZeroOptimizer> zero_optimizer(comm::Communicator& world, std::span<float> parameters, double max_norm) {
  return std::make_unique<Zero>(world, parameters, max_norm);
}

}  // namespace assignment
