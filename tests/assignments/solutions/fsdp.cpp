// A solution of assignment 4.
#include "fsdp.h"

#include <algorithm>
#include <vector>

#include "tessera/nn/optimizer.h"

namespace assignment {
namespace {

using namespace tessera;
using base::MemoryCategory;
using nn::Tensor;

/// A unit: one flat parameter, of which this rank keeps a shard.
class Unit {
 public:
  Unit(nn::Module& module, comm::Communicator& world)
      : world_(world), context_(module.context()), parameters_(module.parameters()) {
    for (const auto& parameter : parameters_) {
      offsets_.push_back(elements_);
      elements_ += parameter->count();
    }
    per_rank_ = (elements_ + world.size() - 1) / world.size();
    shard_ = Tensor::zeros(context_, {per_rank_}, base::DType::f32, MemoryCategory::parameter);
    gradient_ = Tensor::zeros(context_, {per_rank_}, base::DType::f32, MemoryCategory::gradient);
    module.set_hooks({.pre_forward = [this](nn::Phase) { unshard(); },
                      .post_forward = [this](nn::Phase) { reshard(); },
                      .pre_backward = [this] { begin_backward(); },
                      .post_backward = [this] { end_backward(); }});
  }

  void initialize(std::uint64_t seed) {
    const std::int64_t begin = per_rank_ * world_.rank(), end = begin + per_rank_;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const std::int64_t offset = offsets_[i];
      const std::int64_t first = std::max(begin, offset), last = std::min(end, offset + parameters_[i]->count());
      if (first < last)
        nn::fill_initial(parameters_[i]->init(), parameters_[i]->name(), seed, {first - offset, last - offset},
                         shard_.data<float>() + (first - begin));
    }
  }

  void step(const base::OptimizerStep& step) {
    nn::update(context_, {.kind = base::OptimizerConfig::Kind::sgd}, step,
               {.values = shard_.data<float>(), .gradients = gradient_.data<float>(), .count = per_rank_});
  }

  std::span<const float> shard() const { return {shard_.data<float>(), static_cast<std::size_t>(per_rank_)}; }

 private:
  comm::View view(const Tensor& tensor) const {
    return comm::view_of(tensor.data<float>(), static_cast<std::size_t>(tensor.count()));
  }

  Tensor full(MemoryCategory use) {
    return Tensor::zeros(context_, {per_rank_ * world_.size()}, base::DType::f32, use);
  }

  void unshard() {
    unsharded_ = full(MemoryCategory::unsharded_parameter);
    world_.all_gather(view(shard_), view(unsharded_)).wait();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Tensor handle = parameters_[i]->tensor();
      handle.bind(unsharded_.data<float>() + offsets_[i]);
    }
  }

  void reshard() {
    for (const auto& parameter : parameters_) {
      Tensor handle = parameter->tensor();
      handle.unbind("its unit is resharded");
    }
    unsharded_ = {};
  }

  void begin_backward() {
    unshard();
    unsharded_gradient_ = full(MemoryCategory::unsharded_gradient);
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i]->gradient().bind(unsharded_gradient_.data<float>() + offsets_[i], /*keep=*/false);
  }

  void end_backward() {
    reshard();
    world_.reduce_scatter(view(unsharded_gradient_), view(gradient_), comm::ReduceOp::avg()).wait();
    for (const auto& parameter : parameters_) parameter->gradient().unbind();
    unsharded_gradient_ = {};
  }

  comm::Communicator& world_;
  nn::Context& context_;
  const std::vector<std::shared_ptr<nn::Parameter>> parameters_;
  std::vector<std::int64_t> offsets_;  // in the flat parameter
  std::int64_t elements_ = 0;          // without padding
  std::int64_t per_rank_ = 0;
  Tensor shard_, gradient_;                // this rank's
  Tensor unsharded_, unsharded_gradient_;  // while they are needed
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
