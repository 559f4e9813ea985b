// A solution of assignment 3.
#include "zero.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace assignment {
namespace {

using namespace tessera;

class Zero final : public ZeroOptimizer {
 public:
  Zero(comm::Communicator& world, std::span<float> parameters, double max_norm)
      : world_(world), parameters_(parameters), max_norm_(max_norm) {
    const auto n = static_cast<std::size_t>(world.size()), rank = static_cast<std::size_t>(world.rank());
    const auto begin = [&](std::size_t r) { return r == n ? parameters.size() : r * parameters.size() / n / 8 * 8; };
    for (std::size_t r = 0; r < n; ++r) counts_.push_back(begin(r + 1) - begin(r));
    mine_ = parameters.subspan(begin(rank), counts_[rank]);
    for (std::vector<float>* const values : {&gradient_, &m_, &v_}) values->resize(mine_.size());
  }

  void step(std::span<const float> gradients) override {
    world_
        .reduce_scatter_v(comm::view_of(gradients.data(), gradients.size()),
                          comm::view_of(gradient_.data(), gradient_.size()), counts_, comm::ReduceOp::avg())
        .wait();
    if (max_norm_ > 0) clip();
    adamw(mine_, gradient_, m_, v_, ++steps_);
    world_
        .all_gather_v(comm::view_of(mine_.data(), mine_.size()), comm::view_of(parameters_.data(), parameters_.size()),
                      counts_)
        .wait();
  }

 private:
  void clip() {
    double sum = squares(gradient_);
    const comm::View view = comm::view_of(&sum, 1);
    world_.all_reduce(view, view, comm::ReduceOp::sum()).wait();
    const double factor = std::min(1.0, max_norm_ / (std::sqrt(sum) + 1e-6));
    for (float& value : gradient_) value *= static_cast<float>(factor);
  }

  comm::Communicator& world_;
  const std::span<float> parameters_;
  const double max_norm_;
  std::vector<std::size_t> counts_;      // of each rank's slice
  std::span<float> mine_;                // this rank's slice of the parameters
  std::vector<float> gradient_, m_, v_;  // of this rank's slice
  int steps_ = 0;
};

}  // namespace

std::unique_ptr<ZeroOptimizer> zero_optimizer(comm::Communicator& world, std::span<float> parameters, double max_norm) {
  return std::make_unique<Zero>(world, parameters, max_norm);
}

}  // namespace assignment
