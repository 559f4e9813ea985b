// Pipeline parallel: rank r has block r, the first rank the embedding too, and the last one the head. A batch passes in
// microbatches. Words: gpipe (all forwards, then all backwards; the default), 1f1b (a backward as soon as it can),
// model (the whole batch at once: "model parallel"), and a number of microbatches. tessera run -n 4 --
// ./parallel_pipeline 1f1b
#include <memory>

#include "report.h"

using namespace tiny;

namespace {

struct Action {
  bool forward;
  int microbatch;
};

/// What this stage does in a step, in order. Both schedules run the backwards in the order of the microbatches.
std::vector<Action> schedule(bool one_by_one, int microbatches, int stages_after) {
  std::vector<Action> all;
  const int ahead = one_by_one ? std::min(microbatches, stages_after + 1) : microbatches;
  for (int m = 0; m < ahead; ++m) all.push_back({true, m});
  for (int m = 0; m < microbatches; ++m) {
    all.push_back({false, m});
    if (m + ahead < microbatches) all.push_back({true, m + ahead});
  }
  return all;
}

/// The mean, added as ranks would add: neighbors first. Then a pipeline of 4 microbatches and 4 data parallel ranks
/// agree in every bit.
std::vector<float> mean_of(std::vector<std::vector<float>> parts) {
  const auto count = static_cast<float>(parts.size());
  for (std::size_t distance = 1; distance < parts.size(); distance *= 2)
    for (std::size_t i = 0; i + distance < parts.size(); i += 2 * distance)
      for (std::size_t k = 0; k < parts[i].size(); ++k) parts[i][k] += parts[i + distance][k];
  for (float& sum : parts[0]) sum /= count;
  return parts[0];
}

}  // namespace

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context(options());
  if (world->size() != kBlocks) return std::fprintf(stderr, "one rank for each block, please: tessera run -n 4\n"), 2;
  bool one_by_one = false;
  int microbatches = kBlocks;
  Report report(*world, context, "pipeline", argc, argv);
  for (const std::string& word : report.words) {
    one_by_one = one_by_one || word == "1f1b";
    if (word == "model") microbatches = 1;
    if (word.find_first_not_of("0123456789") == std::string::npos) microbatches = std::atoi(word.c_str());
  }
  if (microbatches < 1 || kSequences % microbatches != 0)
    return std::fprintf(stderr, "a number of microbatches that divides %d, please\n", static_cast<int>(kSequences)), 2;

  const int rank = world->rank(), last = kBlocks - 1;
  report.share = 1.0 / microbatches;
  Parameters parameters(context);
  const Tensor embedding = rank == 0 ? add_embedding(parameters) : Tensor();
  const Block block(parameters, rank);
  const auto head = rank == last ? std::make_unique<Head>(parameters) : nullptr;

  const std::int64_t sequences = kSequences / microbatches;
  const nn::Shape shape = {sequences, kPositions, kWidth};
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(sequences * kPositions * kWidth);
  const auto received = [&](int peer, bool of_gradients) {
    const Tensor x = Tensor::empty(context, shape, base::DType::f32);
    report.wait(block.name, bytes, of_gradients,
                [&] { return world->recv(comm::view_of(x.data<float>(), x.count()), peer); });
    return x;
  };

  for (int step = 0; step < report.steps(); ++step) {
    report.begin_step();
    struct InFlight {
      Segment embed, block, head;
    };
    std::vector<InFlight> batches(microbatches);
    std::vector<std::pair<comm::Work, Tensor>> sent;  // and what is sent, which must stay
    std::vector<std::vector<std::vector<float>>> gradients(parameters.all().size());
    double loss = 0;
    for (const auto [forward, m] : schedule(one_by_one, microbatches, last - rank)) {
      InFlight& now = batches[m];
      if (forward) {
        const auto [tokens, targets] = batch(context, step, {sequences * m, sequences});
        Tensor x = rank == 0 ? now.embed.forward(context, {},
                                                 [&](const Tensor&) { return nn::ops::embedding(tokens, embedding); })
                             : received(rank - 1, false);
        const Tensor y = report.time(TraceEventKind::forward, block.name, 0, [&] {
          Tensor out = now.block.forward(context, x, [&](const Tensor& in) { return block.forward(in); });
          return rank == last
                     ? now.head.forward(context, out, [&](const Tensor& in) { return head->loss(in, targets); })
                     : out;
        });
        if (rank == last)
          loss += y.item() / microbatches;
        else
          sent.emplace_back(world->send(comm::view_of(y.data<float>(), y.count()), rank + 1), y);
        continue;
      }
      const Tensor arrived = rank == last ? Tensor() : received(rank + 1, true);
      const Tensor dx = report.time(TraceEventKind::backward, block.name, 0,
                                    [&] { return now.block.backward(rank == last ? now.head.backward() : arrived); });
      if (rank == 0)
        now.embed.backward(dx);
      else
        sent.emplace_back(world->send(comm::view_of(dx.data<float>(), dx.count()), rank - 1), dx);
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const Parameter& p = parameters.all()[i];
        gradients[i].emplace_back(p.gradient().begin(), p.gradient().end());
        p.value.gradient()->clear();
      }
    }
    for (auto& [work, data] : sent) work.wait();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::vector<float> mean = mean_of(std::move(gradients[i]));
      const Parameter& p = parameters.all()[i];
      std::copy(mean.begin(), mean.end(), p.value.gradient()->write().tensor.data<float>());
    }
    report.time(TraceEventKind::optimizer_step, block.name, 0, [&] { parameters.update(); });
    report.end_step(kBlocks * loss);  // only the last rank has it
  }
  report.finish(parameters.all());
}
