#include "tessera/libtorch/engine.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::libtorch {

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

}  // namespace tessera::libtorch
