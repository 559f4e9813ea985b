// Stops a run after three steps and resumes it: half-precision parameters with f32 master weights, two microbatches per
// step, clipped gradients, and a checkpoint that is written during training. The losses are bitwise equal to those of
// an uninterrupted run.
//   tessera run -n 2 -- ./07_save_and_resume

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/init.h"
#include "tessera/fsdp/checkpoint.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"

using namespace tessera;

struct Run {
  explicit Run(comm::Communicator& world)
      : model(make_model(context)),
        engine(*model, world, {.strategy = fsdp::strategies::fsdp(), .reduce_dtype = base::DType::f32, .clip_norm = 1}),
        control(world, context.runtime()) {}

  /// The mean loss over the ranks.
  double step() {
    constexpr int kMicrobatches = 2;
    std::array<int, 2 * 16> batch = {};
    for (int i = 0; i < 32; ++i) batch[i] = (static_cast<int>(engine.steps()) + 7 * i + engine.mesh().rank()) % 256;
    const nn::Tensor tokens = nn::Tensor::from(context, batch, {2, 16});
    double loss = 0;
    for (int i = 0; i < kMicrobatches; ++i) {
      engine.set_is_last_backward(i + 1 == kMicrobatches);  // gradients accumulate until then
      const nn::TapeScope recording(context);
      const nn::Tensor part = model->loss(tokens, tokens);
      part.backward(1.0 / kMicrobatches);
      loss += part.item() / kMicrobatches;
    }
    engine.step(/*learning_rate=*/1e-3);
    control.all_reduce(&loss, 1, comm::ReduceOp::avg(), "loss");
    return loss;
  }

  static std::unique_ptr<nn::CausalModel> make_model(nn::Context& context) {
    auto model = nn::make_model(context, nn::preset("gpt-nano"));
    model->set_dtype(base::DType::bf16);
    return model;
  }

  nn::Context context;
  std::unique_ptr<nn::CausalModel> model;
  fsdp::Engine engine;
  comm::HostCollectives control;
};

int main() {
  const auto world = comm::init();
  const std::string directory = "07_save_and_resume.checkpoints";
  std::vector<double> losses;
  {
    Run run(*world);
    run.engine.initialize(/*seed=*/0);
    fsdp::CheckpointWriter checkpoints(run.engine, run.control, {.directory = directory, .keep_last = 1});
    for (int step = 1; step <= 6; ++step) {
      losses.push_back(run.step());
      if (step == 3) checkpoints.save({{"data", "made up"}});  // returns when the state is copied
      checkpoints.poll();                                      // publishes it once every rank's part is on the disk
    }
    checkpoints.finish();
  }
  Run run(*world);  // as after a crash; the number of ranks and the strategy could change
  fsdp::Checkpoint checkpoint(directory);
  fsdp::restore(run.engine, checkpoint);
  bool same = true;
  for (std::size_t step = run.engine.steps(); step < losses.size(); ++step) {
    const double loss = run.step();
    same = same && loss == losses[step];
    if (world->rank() == 0) std::printf("step %zu loss %.2f\n", step + 1, loss);
  }
  if (world->rank() == 0) std::printf("%s\n", same ? "as if it had never stopped" : "something is wrong");
  run.control.gather_all(std::vector<int>{0});  // all ranks have read the checkpoint
  if (world->rank() == 0) std::filesystem::remove_all(directory);
}
