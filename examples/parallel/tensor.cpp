// Tensor parallel (Shoeybi et al., Megatron-LM, arXiv 1909.08053): every rank has a quarter of each block's heads and
// hidden units, and all tokens. q, k, v and up are divided by columns of the product, o and down by rows, so that a
// block needs two sums in forward and two in backward. With the word "sequence" (Korthikanti et al., arXiv 2205.05198),
// the tokens outside of these products are divided, too. tessera run -n 4 -- ./parallel_tensor
#include "report.h"

using namespace tiny;

namespace {

comm::View view(const Tensor& x) { return comm::view_of(x.data<float>(), static_cast<std::size_t>(x.count())); }

/// Operations whose backward communicates, too.
struct Exchange {
  comm::Communicator& world;
  nn::Context& context;
  Report& report;
  std::string unit;
  bool divides_tokens;

  Tensor sum(const Tensor& x, bool backward) const {
    const Tensor total = Tensor::empty(context, x.shape(), base::DType::f32);
    report.wait(unit, x.bytes(), backward,
                [&] { return world.all_reduce(view(x), view(total), comm::ReduceOp::sum()); });
    return total;
  }
  Tensor gather(const Tensor& x, bool backward) const {
    const Tensor all = Tensor::empty(context, {x.dim(0) * world.size(), x.dim(1), x.dim(2)}, base::DType::f32);
    report.wait(unit, all.bytes(), backward, [&] { return world.all_gather(view(x), view(all)); });
    return all;
  }
  Tensor scatter(const Tensor& x, bool backward) const {
    const Tensor part = Tensor::empty(context, {x.dim(0) / world.size(), x.dim(1), x.dim(2)}, base::DType::f32);
    report.wait(unit, x.bytes(), backward,
                [&] { return world.reduce_scatter(view(x), view(part), comm::ReduceOp::sum()); });
    return part;
  }
  /// Before products divided by columns: each rank gets all tokens. Backward: the sum of what the ranks' parts give.
  Tensor enter(const Tensor& x) const {
    Tensor y = divides_tokens ? gather(x, false) : x.detached();
    if (nn::Tape* tape = nn::recording({x}, y))
      tape->record("enter", y, [*this, dx = x.gradient(), dy = y.gradient()] {
        dx->accumulate(divides_tokens ? scatter(dy->value(), true) : sum(dy->value(), true));
      });
    return y;
  }
  /// After products divided by rows: the sum over the ranks, of all tokens or of this rank's.
  Tensor leave(const Tensor& x) const {
    Tensor y = divides_tokens ? scatter(x, false) : sum(x, false);
    if (nn::Tape* tape = nn::recording({x}, y))
      tape->record("leave", y, [*this, dx = x.gradient(), dy = y.gradient()] {
        dx->accumulate(divides_tokens ? gather(dy->value(), true) : dy->value());
      });
    return y;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context(options());
  Report report(*world, context, "tensor", argc, argv);
  const bool divides_tokens = !report.words.empty() && report.words[0] == "sequence";
  if (kHeads % world->size() != 0) return std::fprintf(stderr, "1, 2 or 4 ranks, please\n"), 2;
  const Part part{world->rank(), world->size()};
  report.share = 1.0 / world->size();
  Parameters parameters(context);
  const Tensor embedding = add_embedding(parameters);
  std::vector<Block> blocks;
  for (int i = 0; i < kBlocks; ++i) blocks.emplace_back(parameters, i, part);
  const Head head(parameters);

  Slice slice;
  if (divides_tokens) slice = {kSequences / world->size() * world->rank(), kSequences / world->size()};
  for (int step = 0; step < report.steps(); ++step) {
    report.begin_step();
    const auto [tokens, targets] = batch(context, step, slice);
    std::vector<Segment> segments(kBlocks + 2);
    Tensor x = segments[0].forward(context, {}, [&](const Tensor&) { return nn::ops::embedding(tokens, embedding); });
    for (const Block& block : blocks)
      x = report.time(TraceEventKind::forward, block.name, 0, [&] {
        const Exchange ranks{*world, context, report, block.name, divides_tokens};
        return segments[&block - blocks.data() + 1].forward(context, x, [&](const Tensor& in) {
          const Tensor y = in + ranks.leave(block.attention(ranks.enter(nn::ops::rms_norm(in, block.norm_1))));
          return y + ranks.leave(block.feed_forward(ranks.enter(nn::ops::rms_norm(y, block.norm_2))));
        });
      });
    const Tensor loss = segments.back().forward(context, x, [&](const Tensor& in) { return head.loss(in, targets); });

    Tensor gradient;
    for (int i = kBlocks + 1; i >= 0; --i)
      gradient = report.time(TraceEventKind::backward, kUnits[i], 0, [&] { return segments[i].backward(gradient); });

    // A rank whose loss is the mean of a part of the tokens has gradients of that mean.
    for (Parameter& p : parameters.all()) {
      const Tensor g = p.value.gradient()->value();
      if (!divides_tokens) continue;
      if (p.part.count == 1)
        report.wait("head", g.bytes(), true,
                    [&] { return world->all_reduce(view(g), view(g), comm::ReduceOp::avg()); });
      else
        for (std::int64_t i = 0; i < g.count(); ++i) g.data<float>()[i] /= static_cast<float>(world->size());
    }
    report.time(TraceEventKind::optimizer_step, "head", 0, [&] { parameters.update(); });
    report.end_step(loss.item());
  }
  report.finish(parameters.all());
}
