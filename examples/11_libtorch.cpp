// A libtorch model under DDP, ZeRO, FSDP or HSDP: embedding, post-norm blocks with bidirectional attention and ReLU, a
// head. TESSERA_UNIT in place of TORCH_MODULE and an engine are all that is new in it.
//   tessera run -n 4 -- ./11_libtorch [STRATEGY [WRAP]]
#include <torch/nn.h>

#include <chrono>
#include <cstdio>

#include "tessera/comm/init.h"
#include "tessera/libtorch/engine.h"

using namespace tessera;
using torch::Tensor;

constexpr std::int64_t kWords = 101, kWidth = 64, kHeads = 4, kBlocks = 3, kPositions = 24, kSequences = 8;

struct BlockImpl : torch::nn::Module {
  BlockImpl()
      : inputs(register_module("inputs", torch::nn::Linear(kWidth, 3 * kWidth))),
        outputs(register_module("outputs", torch::nn::Linear(kWidth, kWidth))),
        up(register_module("up", torch::nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", torch::nn::Linear(4 * kWidth, kWidth))),
        norm_1(register_module("norm_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))),
        norm_2(register_module("norm_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})))) {}
  Tensor forward(Tensor x) {
    std::vector<Tensor> parts = inputs(x).chunk(3, -1);
    for (Tensor& part : parts) part = part.view({x.size(0), x.size(1), kHeads, -1}).transpose(1, 2);
    const Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(kWidth / kHeads);
    const Tensor mixed = torch::matmul(torch::softmax(scores, -1), parts[2]).transpose(1, 2);
    x = norm_1(x + outputs(mixed.reshape(x.sizes())));
    return norm_2(x + down(torch::relu(up(x))));
  }
  torch::nn::Linear inputs, outputs, up, down;
  torch::nn::LayerNorm norm_1, norm_2;
};
TESSERA_UNIT(Block);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl()
      : words(register_module("words", torch::nn::Embedding(kWords, kWidth))),
        places(register_module("places", torch::nn::Embedding(kPositions, kWidth))),
        blocks(register_module("blocks", torch::nn::Sequential())),
        head(register_module("head", torch::nn::Linear(kWidth, kWords))) {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    const Tensor x = words(tokens) + places(torch::arange(kPositions));
    return torch::nn::functional::cross_entropy(head(blocks->forward(x)).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding words, places;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TESSERA_UNIT(Transformer);

int main(int argc, char** argv) {
  const auto world = comm::init();
  torch::manual_seed(1);
  torch::set_num_threads(1);
  Transformer model;
  libtorch::Engine engine(
      *model, *world,
      {.strategy = fsdp::strategy_named(argc > 1 ? argv[1] : "fsdp"), .wrap = argc > 2 ? argv[2] : "block"});
  if (world->rank() == 0)
    for (const fsdp::UnitStats& unit : engine.stats().units())
      std::printf("unit %-9s %6ld parameters\n", unit.name.c_str(), static_cast<long>(unit.elements));

  const auto start = std::chrono::steady_clock::now();
  const std::int64_t mine = kSequences / world->size();  // each rank takes its slice of the batch
  constexpr int kSteps = 40;
  for (int step = 0; step < kSteps; ++step) {
    const Tensor sequence = torch::arange(mine).unsqueeze(1) + mine * world->rank();
    const Tensor tokens = (29 * step + 13 * sequence + 3 * torch::arange(kPositions)) % kWords;
    const Tensor loss = model(tokens, (tokens + 3) % kWords);
    loss.backward();
    engine.step(3e-3);
    double mean = loss.item<double>();
    const comm::View view = comm::view_of(&mean, 1);
    world->all_reduce(view, view, comm::ReduceOp::avg()).wait();
    if (world->rank() == 0 && step % 10 == 9) std::printf("step %d loss %.1f\n", step + 1, mean);
  }
  if (world->rank() != 0) return 0;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const fsdp::EngineTraffic sent = engine.stats().traffic();
  std::printf("each rank sent %.2f MB in all_gather, %.2f MB in reduce_scatter, %.2f MB in all_reduce\n",
              static_cast<double>(sent.all_gather.bytes_sent) / 1e6,
              static_cast<double>(sent.reduce_scatter.bytes_sent) / 1e6,
              static_cast<double>(sent.all_reduce.bytes_sent) / 1e6);
  const auto total_peak = [](base::MemoryTracker& memory) { return static_cast<double>(memory.snapshot().total_peak); };
  std::printf("each rank keeps %.2f MB of state, and has at most %.2f MB unsharded\n",
              total_peak(*world->memory_tracker()) / 1e6, total_peak(engine.model().runtime().memory_tracker()) / 1e6);
  std::fprintf(stderr, "%.0f tokens/s\n", kSteps * kSequences * kPositions / seconds.count());
}
