// Assignment 4: FSDP by hooks. The handout is README.md beside this file.
#include "fsdp.h"

#include <vector>

#include "tessera/nn/optimizer.h"

namespace assignment {
namespace {

using namespace tessera;
using base::MemoryCategory;
using nn::Tensor;

/// A unit: its parameters are one flat parameter, of which this rank keeps a shard.
class Unit {
 public:
  Unit(nn::Module& module, comm::Communicator& world)
      : world_(world), context_(module.context()), parameters_(module.parameters()) {
    // TODO lay out the flat parameter: the offset of each parameter, and per_rank_, which includes the padding.
    shard_ = Tensor::zeros(context_, {per_rank_}, base::DType::f32, MemoryCategory::parameter);
    gradient_ = Tensor::zeros(context_, {per_rank_}, base::DType::f32, MemoryCategory::gradient);
    // TODO set the hooks: module.set_hooks({.pre_forward = .., .post_forward = .., .pre_backward = .., .post_backward =
    // ..}).
  }

  void initialize(std::uint64_t seed) {
    // TODO for each parameter of which this rank has a part: nn::fill_initial(init, name, seed, {begin, end}, out),
    // with begin and end in elements of the parameter.
    (void)seed;
  }

  void step(const base::OptimizerStep& step) {
    nn::update(context_, {.kind = base::OptimizerConfig::Kind::sgd}, step,
               {.values = shard_.data<float>(), .gradients = gradient_.data<float>(), .count = per_rank_});
  }

  std::span<const float> shard() const { return {shard_.data<float>(), static_cast<std::size_t>(per_rank_)}; }

 private:
  // TODO unshard(): gather the flat parameter and bind the parameters to it.
  // TODO reshard(): unbind the parameters and free the flat parameter.
  // TODO begin_backward(): unshard, and bind the gradients to a buffer.
  // TODO end_backward(): reshard, and reduce-scatter the gradients' buffer.

  comm::Communicator& world_;
  nn::Context& context_;
  const std::vector<std::shared_ptr<nn::Parameter>> parameters_;
  std::int64_t per_rank_ = 0;
  Tensor shard_, gradient_;  // this rank's
};

class Sharded final : public Fsdp {
 public:
  Sharded(nn::Module& model, comm::Communicator& world) {
    for (const auto& child : model.children()) units_.push_back(std::make_unique<Unit>(*child, world));
  }
  void initialize(std::uint64_t seed) override {
    for (const auto& unit : units_) unit->initialize(seed);
  }
  void step(float learning_rate) override {
    ++steps_;
    for (const auto& unit : units_) unit->step({.number = steps_, .learning_rate = learning_rate});
  }
  std::span<const float> shard(std::size_t unit) const override { return units_.at(unit)->shard(); }

 private:
  std::vector<std::unique_ptr<Unit>> units_;
  std::uint64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Fsdp> fully_shard(nn::Module& model, comm::Communicator& world) {
  return std::make_unique<Sharded>(model, world);
}

}  // namespace assignment
