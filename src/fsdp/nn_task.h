// A training task of an nn::Module: a task of a plug-in file adds the loss of its samples.
//
//   class Squares : public fsdp::NnTask {
//    public:
//     explicit Squares(const fsdp::TaskSetup& setup)
//         : NnTask(std::make_unique<Mlp>(fsdp::nn_context(setup.runtime), setup.options.integer("width", 64)),
//         setup.seed) {}
//    protected:
//     nn::Tensor loss(std::int64_t step, base::ElementRange samples) override {
//       return nn::cross_entropy(module_as<Mlp>()(inputs(step, samples)), targets(step, samples));
//     }
//   };
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/fsdp/nn_model.h"
#include "tessera/fsdp/training_task.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// See TrainingTask.
class TESSERA_API NnTask : public TrainingTask {
 public:
  /// `module` has no memory yet; its context outlives the task. `seed` is that of dropout.
  NnTask(std::unique_ptr<nn::Module> module, std::uint64_t seed);
  ~NnTask() override;
  nn::Module& module() { return *module_; }  ///< the model as nn knows it
  /// An NnModel, made by the first call: what changes the module's dtypes comes before.
  Model& model() override;
  void forward_backward(std::int64_t step, ElementRange samples, double scale) override;
  double mean_loss() override;
  /// The value of evaluation(), computed without dropout.
  double evaluation_loss(ElementRange samples) override;

 protected:
  /// The mean loss of `samples` of step `step`: a scalar. On a context without data the tensors have shapes alone.
  virtual nn::Tensor loss(std::int64_t step, ElementRange samples) = 0;
  /// The mean loss of these samples for an evaluation: a scalar. Throws Unsupported by default.
  virtual nn::Tensor evaluation(ElementRange samples);
  /// The loss after its forward and backward; by default those of loss().
  virtual nn::Tensor run_step(std::int64_t step, ElementRange samples, double scale);
  /// Calls `forward` and runs the backward of the loss that it returns.
  nn::Tensor differentiate(const std::function<nn::Tensor()>& forward, double scale);
  /// The module as the class that it is.
  template <class M>
  M& module_as() {
    return static_cast<M&>(*module_);
  }
  nn::Context& context() { return module_->context(); }  ///< where the module computes

 private:
  const std::unique_ptr<nn::Module> module_;
  const std::uint64_t seed_;
  std::unique_ptr<NnModel> model_;
  std::vector<nn::Tensor> losses_;  // on the device until they are asked for
};

}  // namespace tessera::fsdp
