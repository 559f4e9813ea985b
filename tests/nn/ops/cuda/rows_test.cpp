// CUDA kernels that combine elements of a row or of a column, emulated, against the host's in double.
#include <numeric>

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaRows : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaRows, Types);

struct Rows {
  std::size_t rows, width;
};
constexpr Rows kRows[] = {{1, 1}, {3, 5}, {37, 64}, {19, 300}};

TYPED_TEST(CudaRows, LayerNormForward) {
  using T = TypeParam;
  for (const Rows r : kRows) {
    const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width), b = numbers<T>("b", r.width);
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> in(x), weight(w), bias(b);
          Array<U> y = Array<U>::poisoned(x.size()), plain = Array<U>::poisoned(x.size());
          auto mean = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
          auto rstd = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
          k.layer_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), bias.data(), OpMath<U>(1e-3), y.data(),
                                   mean->data(), rstd->data()});
          k.layer_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), nullptr, OpMath<U>(1e-3), plain.data()});
          return y.values() + plain.values() + mean->values() + rstd->values();
        },
        60);
  }
}

/// Gradients of layer norm (`centered`) or RMS norm, each overwritten and accumulated, dx also in place.
template <class T>
void check_norm_backward(Rows r, bool centered) {
  const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width), dy = numbers<T>("dy", x.size());
  const auto rstd = numbers<OpMath<T>>("rstd", r.rows, 0.3), mean = numbers<OpMath<T>>("mean", r.rows, 0.3);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x), weight(w), from(dy), to(dy), dw(w), db(w);
        Array<U> dw_new = Array<U>::poisoned(r.width);
        Array<OpMath<U>> m(mean), q(rstd);
        const auto run = [&](U* dx, U* dweight, U* dbias, bool accumulate) {
          if (centered) {
            k.layer_norm_backward(s, {r.rows, r.width, in.data(), weight.data(), m.data(), q.data(), from.data(), dx,
                                      dweight, dbias, accumulate, accumulate, accumulate});
          } else {
            k.rms_norm_backward(s, {r.rows, r.width, in.data(), weight.data(), q.data(), from.data(), dx, dweight,
                                    accumulate, accumulate});
          }
        };
        run(to.data(), dw.data(), db.data(), true);
        run(from.data(), dw_new.data(), nullptr, false);
        return to.values() + dw.values() + db.values() + from.values() + dw_new.values();
      },
      60);
}

TYPED_TEST(CudaRows, NormsBackward) {
  for (const Rows r : kRows)
    for (const bool centered : {false, true}) check_norm_backward<TypeParam>(r, centered);
}

TYPED_TEST(CudaRows, RmsNormForward) {
  using T = TypeParam;
  const Rows r{7, 131};
  const auto x = numbers<T>("x", r.rows * r.width), w = numbers<T>("w", r.width);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(x), weight(w);
        Array<U> y = Array<U>::poisoned(x.size());
        auto rstd = std::make_unique<Array<OpMath<U>>>(std::vector<double>(r.rows, NAN));
        k.rms_norm_forward(s, {r.rows, r.width, in.data(), weight.data(), OpMath<U>(1e-3), y.data(), rstd->data()});
        return y.values() + rstd->values();
      },
      30);
}

TYPED_TEST(CudaRows, PartialNorms) {
  using T = TypeParam;
  using kernels::Norm;
  for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity})
    for (const std::size_t count : {0U, 1U, 255U, 16384U, 40001U}) {
      const auto x = numbers<T>("x", count);
      double powers[4] = {};
      for (const double v : x) {
        powers[0] += std::abs(v);
        powers[1] += v * v;
        powers[2] += std::abs(v * v * v);
        powers[3] = std::max(powers[3], std::abs(v));
      }
      std::vector<double> parts;
      const auto part_of = [&](const std::vector<double>& values) {
        double part = 0;
        Devices().on_device([&](DeviceKernels& k, Stream& stream) {
          Array<T> in(values);
          Array<double> out({NAN});
          k.of<T>()->norm_part(stream, norm, in.data(), count, out.data());
          part = out.values()[0];
        });
        return part;
      };
      for (int order = 0; order < kThreadOrders; ++order) {
        set_thread_order(order);
        parts.push_back(part_of(x));
      }
      set_thread_order(0);
      const double expected = powers[static_cast<int>(norm)];
      EXPECT_NEAR(parts[0], expected, 1e-12 * (1 + expected));
      for (const double part : parts) EXPECT_EQ(part, parts[0]);
      if (count == 0) continue;
      auto bad = x;
      bad[count / 2] = NAN;
      EXPECT_TRUE(std::isnan(part_of(bad)));
    }
}

TYPED_TEST(CudaRows, LinearWithBias) {
  using T = TypeParam;
  const std::size_t rows = 53, in = 7, out = 139;
  const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out), b = numbers<T>("b", out),
             dy = numbers<T>("dy", rows * out);
  for (const auto layout : {kernels::WeightLayout::out_in, kernels::WeightLayout::in_out}) {
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> a(x), weight(w), bias(b), from(dy), dx(x), db(b);
          Array<U> y = Array<U>::poisoned(dy.size()), dw = Array<U>::poisoned(w.size());
          const kernels::LinearShape shape{rows, in, out, layout};
          k.linear_forward(s, {shape, a.data(), weight.data(), bias.data(), y.data()});
          k.linear_backward(
              s, {shape, a.data(), weight.data(), from.data(), dx.data(), dw.data(), db.data(), true, false, true});
          return y.values() + dx.values() + dw.values() + db.values();
        },
        200);
  }
}

/// Widths that cuBLASLt's epilogue supports and ones that it doesn't; GELU, which it has, and another activation.
TYPED_TEST(CudaRows, LinearWithActivation) {
  using T = TypeParam;
  const std::size_t rows = 53, in = 7;
  for (const std::size_t out : {std::size_t{136}, std::size_t{139}})
    for (const auto kind : {kernels::Activation::gelu_tanh, kernels::Activation::silu}) {
      const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out), b = numbers<T>("b", out);
      expect_as_in_double<T>(
          [&]<class U>(KernelTable<U>& k, Stream& s) {
            Array<U> a(x), weight(w), bias(b);
            Array<U> y = Array<U>::poisoned(rows * out), activated = Array<U>::poisoned(rows * out);
            k.linear_forward(s, {.shape = {rows, in, out},
                                 .x = a.data(),
                                 .weight = weight.data(),
                                 .bias = bias.data(),
                                 .y = y.data(),
                                 .activated = activated.data(),
                                 .activation = kind});
            return y.values() + activated.values();
          },
          200);
    }
}

struct AttentionCase {
  std::size_t batch, positions, heads, kv_heads, dim;
  double dropout;
  bool fused, accumulate;
};

template <class T>
void check_attention(const AttentionCase& c) {
  const std::size_t q_size = c.batch * c.positions * c.heads * c.dim, kv_size = q_size / c.heads * c.kv_heads;
  const auto qkv = numbers<T>("qkv", q_size + 2 * kv_size), dout = numbers<T>("dout", q_size);
  const kernels::AttentionShape shape{c.batch, c.positions, c.heads, c.kv_heads, c.dim, 0.0};
  const kernels::AttentionDropout dropout{c.dropout, dropout_stream(1, 2, "h.0.attn", 3)};
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> in(qkv), from(dout), gradient(qkv);
        Array<U> y = Array<U>::poisoned(q_size);
        Array<OpMath<U>> statistics(std::vector<double>(q_size / c.dim, NAN));
        const auto part = [&]<class P>(P* data, std::size_t index) {
          if (c.fused) return kernels::fused_qkv_view<P>(data, index, c.positions, c.heads, c.dim);
          P* const begin = data + (index == 0 ? 0 : q_size + (index - 1) * kv_size);
          return kernels::heads_view<P>(begin, c.positions, index == 0 ? c.heads : c.kv_heads, c.dim);
        };
        const U* input = in.data();
        const std::size_t needed = std::max(k.attention_forward_scratch(shape), k.attention_backward_scratch(shape));
        Array<double> scratch(std::vector<double>(needed / sizeof(double) + 16));
        auto* aligned = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(scratch.data()) + 63) / 64 * 64);
        k.attention_forward(
            s, {shape, part(input, 0), part(input, 1), part(input, 2),
                kernels::heads_view<U>(y.data(), c.positions, c.heads, c.dim), statistics.data(), aligned, dropout});
        kernels::AttentionBackward<U> back{shape, part(input, 0), part(input, 1), part(input, 2)};
        back.out = kernels::heads_view<const U>(y.data(), c.positions, c.heads, c.dim);
        back.dout = kernels::heads_view<const U>(from.data(), c.positions, c.heads, c.dim);
        back.log_sum_exp = statistics.data();
        back.dq = part(gradient.data(), 0), back.dk = part(gradient.data(), 1), back.dv = part(gradient.data(), 2);
        back.accumulate_dq = back.accumulate_dk = back.accumulate_dv = c.accumulate;
        back.scratch = aligned, back.dropout = dropout;
        k.attention_backward(s, back);
        return y.values() + statistics.values() + gradient.values();
      },
      400, 8.0);  // matrix units round weights and their gradients before the next product
}

TYPED_TEST(CudaRows, AttentionOfUnevenShapes) {
  const AttentionCase cases[] = {
      {1, 1, 1, 1, 8, 0.0, true, false},    {2, 67, 2, 2, 5, 0.0, true, true},    {1, 130, 4, 2, 16, 0.0, false, false},
      {1, 66, 1, 1, 64, 0.0, true, true},   {2, 33, 2, 1, 12, 0.25, false, true}, {1, 65, 1, 1, 65, 0.1, true, false},
      {1, 17, 2, 2, 130, 0.0, true, false}, {1, 129, 2, 1, 64, 0.1, false, true}, {1, 70, 1, 1, 128, 0.0, true, true}};
  for (const AttentionCase& c : cases) check_attention<TypeParam>(c);
}

#if !defined(TESSERA_TEST_HOST)
TEST(CudaRowsOnly, AttentionRejectsTooLargeHeads) {
  Devices devices;
  kernels::AttentionForward<float> args;
  args.shape = {1, 1, 1, 1, 300, 0.0};
  EXPECT_THROW(devices.kernels->f32_kernels()->attention_forward(devices.stream, args), Unsupported);
}
#endif

}  // namespace
}  // namespace tessera::nn::test
