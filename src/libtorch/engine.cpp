#include "tessera/libtorch/engine.h"

#include <torch/utils.h>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/libtorch/torch_task.h"
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

Engine::Engine(torch::nn::Module& model, comm::Communicator& world, fsdp::EngineOptions options, InitialValues values,
               Initializer initializer)
    : EngineModel{TorchModel(model, std::move(initializer))}, fsdp::Engine(torch_model, world, std::move(options)) {
  initialize(0);
  if (values == InitialValues::first_rank && world.size() > 1)
    state().broadcast_from(0, [](const fsdp::Parameter& parameter, base::ElementRange range, float* out) {
      const torch::NoGradGuard no_grad;
      torch::from_blob(out, {range.count()})
          .copy_(initial_values(parameter).flatten().slice(0, range.begin, range.end));
    });
  torch_model.release_initial_values();
}

std::map<std::string, torch::Tensor> Engine::state_dict() {
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> values;
  state().for_each_parameter([&](const fsdp::Parameter& parameter, std::span<const float> all) {
    values[parameter.name()] = torch::from_blob(const_cast<float*>(all.data()), parameter.shape())
                                   .to(torch_tensor(parameter).scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  });
  for (const auto& buffer : state().buffers())
    values[buffer->name()] = torch_tensor(*buffer).to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true);
  return values;
}

void Engine::consolidate(torch::nn::Module& plain) {
  const std::map<std::string, torch::Tensor> values = state_dict();
  const torch::NoGradGuard no_grad;
  std::map<std::string, torch::Tensor> targets;
  for (const auto& item : plain.named_parameters()) targets[item.key()] = item.value();
  for (const auto& item : plain.named_buffers()) targets[item.key()] = item.value();
  for (const auto& [name, value] : values) {
    const auto target = targets.find(name);
    if (target == targets.end() || target->second.sizes() != value.sizes())
      throw base::InvalidUsage("consolidate: the other model has no " + name + " of shape " +
                               base::to_string(value.sizes().vec()) + "; construct it as the one that is trained");
  }
  for (const auto& [name, value] : values) targets.at(name).copy_(value);
}

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
