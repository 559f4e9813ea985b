// A training task of a libtorch model: a task of a plug-in file adds the loss of its samples.
//
//   class Numbers : public libtorch::TorchTask {
//    public:
//     explicit Numbers(const fsdp::TaskSetup& setup) : TorchTask(setup, [] { return std::make_shared<NetImpl>(); }) {}
//    protected:
//     torch::Tensor loss(std::int64_t step, base::ElementRange samples) override {
//       return torch::nll_loss(module_as<NetImpl>().forward(images(step, samples)), labels(step, samples));
//     }
//   };
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/fsdp/training_task.h"
#include "tessera/libtorch/model.h"

namespace tessera::libtorch {

/// See TrainingTask. The parameters begin with the values that the module was constructed with.
class TESSERA_API TorchTask : public fsdp::TrainingTask {
 public:
  /// Calls `make` after it has seeded Torch's generator with setup.seed, so that all ranks make the same values, and
  /// converts the module to setup.dtype and moves it to the device of the setup; to the host where that has no data,
  /// since libtorch computes values. Throws what `make` and TorchModel's constructor throw.
  TorchTask(const fsdp::TaskSetup& setup, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
            Initializer initializer = {});
  ~TorchTask() override;
  fsdp::Model& model() override { return model_; }  ///< a TorchModel
  /// Seeds Torch's generator before the forward, from the seed, the step and the first sample.
  void forward_backward(std::int64_t step, base::ElementRange samples, double scale) override;
  double mean_loss() override;
  /// The value of evaluation(), with the module in evaluation mode and without gradients.
  double evaluation_loss(base::ElementRange samples) override;

 protected:
  /// The mean loss of `samples` of step `step`: a scalar.
  virtual torch::Tensor loss(std::int64_t step, base::ElementRange samples) = 0;
  /// The mean loss of these samples for an evaluation: a scalar. Throws Unsupported by default.
  virtual torch::Tensor evaluation(base::ElementRange samples);
  /// The device of the module, on which a loss makes its batches.
  torch::Device device() const { return module_->parameters().at(0).device(); }
  /// The module as the class that it is.
  template <class M>
  M& module_as() {
    return static_cast<M&>(*module_);
  }

 private:
  torch::Tensor between_hooks(const std::function<torch::Tensor()>& forward);
  const std::shared_ptr<torch::nn::Module> module_;
  const std::uint64_t seed_;
  TorchModel model_;
  std::vector<torch::Tensor> losses_;
};

}  // namespace tessera::libtorch
