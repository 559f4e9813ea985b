// A libtorch model for the tool's commands: points of two spirals, and a perceptron with dropout that tells them apart.
#include <torch/nn.h>

#include "tessera/fsdp/plugin.h"
#include "tessera/libtorch/torch_task.h"
#include "tessera/libtorch/unit.h"

namespace {

using namespace tessera;
using torch::Tensor;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))),
        dropout(register_module("dropout", torch::nn::Dropout(0.1))) {}
  Tensor forward(const Tensor& x) { return x + dropout(torch::tanh(linear(x))); }
  torch::nn::Linear linear;
  torch::nn::Dropout dropout;
};
TESSERA_UNIT(Block);

struct NetImpl : torch::nn::Module {
  NetImpl(std::int64_t width, std::int64_t count)
      : inputs(register_module("inputs", torch::nn::Linear(2, width))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        outputs(register_module("outputs", torch::nn::Linear(width, 2))) {
    for (std::int64_t i = 0; i < count; ++i) blocks->push_back(Block(width));
  }
  Tensor forward(const Tensor& points) { return outputs(blocks->forward(torch::tanh(inputs(points)))); }
  torch::nn::Linear inputs;
  torch::nn::Sequential blocks;
  torch::nn::Linear outputs;
};

class SpiralTask final : public libtorch::TorchTask {
 public:
  explicit SpiralTask(const fsdp::TaskSetup& setup)
      : TorchTask(setup,
                  [&] {
                    return std::make_shared<NetImpl>(setup.options.integer("width", 32),
                                                     setup.options.integer("blocks", 3));
                  }),
        dtype_(setup.dtype == base::DType::f32 ? torch::kFloat : torch::kBFloat16),
        evaluation_samples_(setup.options.integer("eval", 0, 0)) {}
  std::int64_t evaluation_samples() const override { return evaluation_samples_; }

 protected:
  Tensor loss(std::int64_t step, base::ElementRange samples) override {
    const Tensor number = torch::arange(samples.begin, samples.end, torch::TensorOptions(device())) + 8 * step;
    const Tensor which = number % 2, turn = (number * 37 % 100).to(torch::kFloat) / 100;
    const Tensor angle = 6 * turn + 3.14159F * which;
    const Tensor points = torch::stack({turn * torch::cos(angle), turn * torch::sin(angle)}, 1).to(dtype_);
    return torch::nn::functional::cross_entropy(module_as<NetImpl>().forward(points), which);
  }
  Tensor evaluation(base::ElementRange samples) override { return loss(1000, samples); }

 private:
  const torch::Dtype dtype_;
  const std::int64_t evaluation_samples_;
};

fsdp::PluginExports exports() {
  return {.tasks = {{"spiral", [](const fsdp::TaskSetup& setup) { return std::make_unique<SpiralTask>(setup); }}}};
}

}  // namespace

TESSERA_FSDP_PLUGIN(exports)
