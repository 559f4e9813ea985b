#include "tessera/libtorch/torch_task.h"

#include <torch/utils.h>

#include <utility>

#include "tessera/fsdp/nn_model.h"
#include "tessera/libtorch/unit.h"

namespace tessera::libtorch {
namespace {

std::shared_ptr<torch::nn::Module> module_of(const fsdp::TaskSetup& setup,
                                             const std::function<std::shared_ptr<torch::nn::Module>()>& make) {
  const base::Device device = setup.runtime.device();
  torch::manual_seed(setup.seed);
  std::shared_ptr<torch::nn::Module> module = make();
  if (setup.dtype != base::DType::f32) module->to(setup.dtype == base::DType::bf16 ? torch::kBFloat16 : torch::kHalf);
  if (device.type == base::DeviceType::cuda)
    module->to(torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(device.index)));
  return module;
}

/// Those of a simulated step, whose model computes on the host all the same; empty for a step that runs.
StreamMaker streams_of(const fsdp::TaskSetup& setup) {
  if (setup.runtime.device().type != base::DeviceType::meta) return {};
  return [&context = fsdp::nn_context(setup.runtime)] { return context.make_stream(); };
}

}  // namespace

TorchTask::TorchTask(const fsdp::TaskSetup& setup, const std::function<std::shared_ptr<torch::nn::Module>()>& make,
                     Initializer initializer)
    : module_(module_of(setup, make)),
      seed_(setup.seed),
      model_(*module_, std::move(initializer), setup.memory_tracker, streams_of(setup)) {}
TorchTask::~TorchTask() = default;

void TorchTask::forward_backward(std::int64_t step, base::ElementRange samples, double scale) {
  model_.release_initial_values();
  torch::manual_seed(seed_ + 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(step + 1) +
                     static_cast<std::uint64_t>(samples.begin));
  const torch::Tensor result = between_hooks([&] { return loss(step, samples); });
  result.backward(torch::full_like(result, scale));
  losses_.push_back(result.detach());
}

torch::Tensor TorchTask::between_hooks(const std::function<torch::Tensor()>& forward) {
  return detail::run_between_hooks(model_.root_is_unit() ? nullptr : model_.boundary(), forward);
}

double TorchTask::evaluation_loss(base::ElementRange samples) {
  const torch::NoGradGuard no_grad;
  module_->eval();
  const double value = between_hooks([&] { return evaluation(samples); }).item<double>();
  module_->train();
  return value;
}

torch::Tensor TorchTask::evaluation(base::ElementRange /*samples*/) { refuse_evaluation(); }

double TorchTask::mean_loss() {
  const std::vector<torch::Tensor> losses = std::exchange(losses_, {});
  double mean = 0;
  for (const torch::Tensor& loss : losses) mean += loss.item<double>() / static_cast<double>(losses.size());
  return mean;
}

}  // namespace tessera::libtorch
