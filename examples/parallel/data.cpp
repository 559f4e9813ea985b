// Data parallel (DDP without its buckets): every rank has the whole model and a part of the batch, and the gradients
// are averaged. tessera run -n 4 -- ./parallel_data
#include "report.h"

using namespace tiny;

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context(options());
  Report report(*world, context, "data", argc, argv);
  report.share = 1.0 / world->size();
  Parameters parameters(context);
  const Tensor embedding = add_embedding(parameters);
  std::vector<Block> blocks;
  for (int i = 0; i < kBlocks; ++i) blocks.emplace_back(parameters, i);
  const Head head(parameters);

  const std::int64_t sequences = kSequences / world->size();
  for (int step = 0; step < report.steps(); ++step) {
    report.begin_step();
    const auto [tokens, targets] = batch(context, step, {sequences * world->rank(), sequences});
    std::vector<Segment> segments(kBlocks + 2);
    Tensor x = report.time(TraceEventKind::forward, "embed", 0, [&] {
      return segments[0].forward(context, {}, [&](const Tensor&) { return nn::ops::embedding(tokens, embedding); });
    });
    for (const Block& block : blocks)
      x = report.time(TraceEventKind::forward, block.name, 0, [&] {
        Segment& segment = segments[&block - blocks.data() + 1];
        return segment.forward(context, x, [&](const Tensor& in) { return block.forward(in); });
      });
    const Tensor loss = report.time(TraceEventKind::forward, "head", 0, [&] {
      return segments.back().forward(context, x, [&](const Tensor& in) { return head.loss(in, targets); });
    });

    Tensor gradient;
    for (int i = kBlocks + 1; i >= 0; --i)
      gradient = report.time(TraceEventKind::backward, kUnits[i], 0, [&] { return segments[i].backward(gradient); });

    std::vector<float> gradients;  // in one piece: one all-reduce
    for (const Parameter& p : parameters.all())
      gradients.insert(gradients.end(), p.gradient().begin(), p.gradient().end());
    const comm::View all = comm::view_of(gradients.data(), gradients.size());
    report.wait("embed", 4 * gradients.size(), true,
                [&] { return world->all_reduce(all, all, comm::ReduceOp::avg()); });
    const float* mean = gradients.data();
    for (Parameter& p : parameters.all()) {
      std::copy_n(mean, p.count(), p.value.gradient()->value().data<float>());
      mean += p.count();
    }
    report.time(TraceEventKind::optimizer_step, "embed", 0, [&] { parameters.update(); });
    report.end_step(loss.item());
  }
  report.finish(parameters.all());
}
