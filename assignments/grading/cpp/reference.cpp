#include "grading/cpp/reference.h"

#include "tessera/fsdp/nn_model.h"

namespace grading {

using namespace tessera;

std::vector<std::vector<float>> parameters_of(Model& model) {
  std::vector<std::vector<float>> units;
  for (const auto& child : model.children()) {
    std::vector<float>& values = units.emplace_back();
    for (const auto& parameter : child->parameters()) {
      const float* const data = parameter->tensor().data<float>();
      values.insert(values.end(), data, data + parameter->count());
    }
  }
  return units;
}

Reference train_reference(comm::Communicator& world, const Skipped& skipped) {
  nn::Context context;
  Model model(context);
  fsdp::Engine engine(
      model, world,
      {.strategy = fsdp::strategies::ddp(), .wrap = "none", .optimizer = {.kind = base::OptimizerConfig::Kind::sgd}});
  engine.initialize(/*seed=*/7);
  Reference result;
  engine.wait();
  result.initial = parameters_of(model);
  for (int step = 0; step < kSteps; ++step) {
    if (skipped) model.skip_block(skipped(step, world.rank()));
    const Batch batch = batch_of(context, step, world.rank());
    const nn::TapeScope recording(context);
    const nn::Tensor loss = model(batch.tokens, batch.targets);
    loss.backward();
    engine.step(kLearningRate);
    result.losses.push_back(loss.item());
    if (step > 0) continue;
    engine.wait();
    result.first = parameters_of(model);
  }
  engine.wait();
  result.final = parameters_of(model);
  return result;
}

}  // namespace grading
