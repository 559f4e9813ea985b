// Context parallel: every rank has the whole model and a quarter of the positions of every sequence. Only attention
// looks at other positions: it gathers the keys and values, and in backward each rank gets the sum of what the ranks'
// queries say about its own. tessera run -n 4 -- ./parallel_context
#include <cmath>

#include "report.h"
#include "tessera/base/portable_math.h"

using namespace tiny;

namespace {

comm::View view(const Tensor& x) { return comm::view_of(x.data<float>(), static_cast<std::size_t>(x.count())); }

/// Keys or values of all positions, as all-gathered: [rank, sequence, position of the rank, width].
Tensor gathered(comm::Communicator& world, Report& report, const std::string& unit, const Tensor& x) {
  nn::Context& context = x.context();
  const nn::Shape shape = {world.size() * x.dim(0), x.dim(1), x.dim(2)};
  Tensor all = Tensor::empty(context, shape, base::DType::f32);
  report.wait(unit, all.bytes(), false, [&] { return world.all_gather(view(x), view(all)); });
  if (nn::Tape* tape = nn::recording({x}, all))
    tape->record(
        "gathered", all, [&world, &report, &context, unit, own = x.shape(), dx = x.gradient(), dall = all.gradient()] {
          const Tensor sum = Tensor::empty(context, own, base::DType::f32);
          report.wait(unit, dall->value().bytes(), true,
                      [&] { return world.reduce_scatter(view(dall->value()), view(sum), comm::ReduceOp::sum()); });
          dx->accumulate(sum);
        });
  return all;
}

/// Causal attention of this rank's queries over all positions, written out: softmax(q k / sqrt(dim)) v.
struct Attention {
  std::int64_t rank, sequences, positions, heads = kHeads, dim = kWidth / kHeads;

  std::int64_t query(std::int64_t s, std::int64_t p, std::int64_t h) const {
    return (s * positions + p) * kWidth + h * dim;
  }
  std::int64_t key(std::int64_t s, std::int64_t at, std::int64_t h) const {  // `at`: in the whole sequence
    return ((at / positions * sequences + s) * positions + at % positions) * kWidth + h * dim;
  }
  static float dot(const float* a, const float* b, std::int64_t count) {
    float sum = 0;
    for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
  }
  static void add(float* to, float factor, const float* x, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) to[i] += factor * x[i];
  }
  /// The weights of a query: over the positions up to its own.
  std::vector<float> weights(const float* q, const float* k, std::int64_t s, std::int64_t p, std::int64_t h) const {
    std::vector<float> w(static_cast<std::size_t>(rank * positions + p + 1));
    float most = std::numeric_limits<float>::lowest(), sum = 0;
    for (std::size_t at = 0; at < w.size(); ++at) {
      w[at] = dot(q + query(s, p, h), k + key(s, static_cast<std::int64_t>(at), h), dim) /
              std::sqrt(static_cast<float>(dim));
      most = std::max(most, w[at]);
    }
    for (float& weight : w)  // with the same bits on every processor
      sum += weight = static_cast<float>(base::portable::exp(weight - most));
    for (float& weight : w) weight /= sum;
    return w;
  }
  template <class Each>
  void each_query(Each&& each) const {
    for (std::int64_t s = 0; s < sequences; ++s)
      for (std::int64_t p = 0; p < positions; ++p)
        for (std::int64_t h = 0; h < heads; ++h) each(s, p, h);
  }
  void forward(const float* q, const float* k, const float* v, float* out) const {
    each_query([&](std::int64_t s, std::int64_t p, std::int64_t h) {
      const std::vector<float> w = weights(q, k, s, p, h);
      for (std::size_t at = 0; at < w.size(); ++at)
        add(out + query(s, p, h), w[at], v + key(s, static_cast<std::int64_t>(at), h), dim);
    });
  }
  /// Adds to dq, dk and dv.
  void backward(const float* q, const float* k, const float* v, const float* dout, float* dq, float* dk,
                float* dv) const {
    each_query([&](std::int64_t s, std::int64_t p, std::int64_t h) {
      const std::vector<float> w = weights(q, k, s, p, h);
      const float* const upstream = dout + query(s, p, h);
      std::vector<float> dw(w.size());
      float mean = 0;
      for (std::size_t at = 0; at < w.size(); ++at) {
        dw[at] = dot(upstream, v + key(s, static_cast<std::int64_t>(at), h), dim);
        mean += w[at] * dw[at];
      }
      for (std::size_t at = 0; at < w.size(); ++at) {
        const std::int64_t there = key(s, static_cast<std::int64_t>(at), h);
        const float score = w[at] * (dw[at] - mean) / std::sqrt(static_cast<float>(dim));
        add(dv + there, w[at], upstream, dim);
        add(dq + query(s, p, h), score, k + there, dim);
        add(dk + there, score, q + query(s, p, h), dim);
      }
    });
  }
};

Tensor attention(const Attention& how, const Tensor& q, const Tensor& k, const Tensor& v) {
  nn::Context& context = q.context();
  Tensor out = Tensor::zeros(context, q.shape(), base::DType::f32);
  how.forward(q.data<float>(), k.data<float>(), v.data<float>(), out.data<float>());
  if (nn::Tape* tape = nn::recording({q, k, v}, out))
    tape->record("attention", out, [&context, how, q, k, v, dout = out.gradient()] {
      const Tensor dq = Tensor::zeros(context, q.shape(), base::DType::f32);
      const Tensor dk = Tensor::zeros(context, k.shape(), base::DType::f32);
      const Tensor dv = Tensor::zeros(context, v.shape(), base::DType::f32);
      how.backward(q.data<float>(), k.data<float>(), v.data<float>(), dout->value().data<float>(), dq.data<float>(),
                   dk.data<float>(), dv.data<float>());
      q.gradient()->accumulate(dq);
      k.gradient()->accumulate(dk);
      v.gradient()->accumulate(dv);
    });
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const auto world = comm::init();
  nn::Context context(options());
  Report report(*world, context, "context", argc, argv);
  if (kPositions % world->size() != 0) return std::fprintf(stderr, "1, 2, 4, 8 or 16 ranks, please\n"), 2;
  report.share = 1.0 / world->size();
  Parameters parameters(context);
  const Tensor embedding = add_embedding(parameters);
  std::vector<Block> blocks;
  for (int i = 0; i < kBlocks; ++i) blocks.emplace_back(parameters, i);
  const Head head(parameters);

  const std::int64_t positions = kPositions / world->size();
  const Attention how{world->rank(), kSequences, positions};
  for (int step = 0; step < report.steps(); ++step) {
    report.begin_step();
    const auto [tokens, targets] = batch(context, step, {0, kSequences, positions * world->rank(), positions});
    std::vector<Segment> segments(kBlocks + 2);
    Tensor x = segments[0].forward(context, {}, [&](const Tensor&) { return nn::ops::embedding(tokens, embedding); });
    for (const Block& block : blocks)
      x = report.time(TraceEventKind::forward, block.name, 0, [&] {
        return segments[&block - blocks.data() + 1].forward(context, x, [&](const Tensor& in) {
          const Tensor h = nn::ops::rms_norm(in, block.norm_1);
          const Tensor k = gathered(*world, report, block.name, nn::ops::linear(h, block.k));
          const Tensor v = gathered(*world, report, block.name, nn::ops::linear(h, block.v));
          const Tensor y = in + nn::ops::linear(attention(how, nn::ops::linear(h, block.q), k, v), block.o);
          return y + block.feed_forward(nn::ops::rms_norm(y, block.norm_2));
        });
      });
    const Tensor loss = segments.back().forward(context, x, [&](const Tensor& in) { return head.loss(in, targets); });

    Tensor gradient;
    for (int i = kBlocks + 1; i >= 0; --i)
      gradient = report.time(TraceEventKind::backward, kUnits[i], 0, [&] { return segments[i].backward(gradient); });

    for (Parameter& p : parameters.all()) {  // as in data parallel: the mean over the ranks' tokens
      const Tensor g = p.value.gradient()->value();
      report.wait("embed", g.bytes(), true, [&] { return world->all_reduce(view(g), view(g), comm::ReduceOp::avg()); });
    }
    report.time(TraceEventKind::optimizer_step, "embed", 0, [&] { parameters.update(); });
    report.end_step(loss.item());
  }
  report.finish(parameters.all());
}
