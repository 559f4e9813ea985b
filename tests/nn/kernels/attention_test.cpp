#include "tessera/nn/kernels/attention.h"

#include "tessera/base/error.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

/// A problem with separate q, k, v of [batch, positions, heads, dim].
template <class T>
struct Case {
  AttentionShape shape;
  std::size_t nq, nk;
  std::vector<T> q, k, v, dout, out, lse, dq, dk, dv;
  explicit Case(const AttentionShape& s)
      : shape(s),
        nq(s.batch * s.positions * s.heads * s.dim),
        nk(s.batch * s.positions * s.kv_heads * s.dim),
        q(random_vector<T>(nq, 1)),
        k(random_vector<T>(nk, 2)),
        v(random_vector<T>(nk, 3)),
        dout(random_vector<T>(nq, 4)),
        out(nq, T(NAN)),
        lse(s.batch * s.heads * s.positions, T(NAN)),
        dq(nq, T(NAN)),
        dk(nk, T(NAN)),
        dv(nk, T(NAN)) {}
  template <class U>
  HeadsView<U> view(std::vector<T>& x, std::size_t heads) {
    return heads_view(static_cast<U*>(x.data()), shape.positions, heads, shape.dim);
  }
  void forward(ThreadPool& pool) {
    const auto room = scratch(attention_forward_scratch_bytes(shape, pool.threads(), sizeof(T)));
    attention_forward<T>(pool, {shape, view<const T>(q, shape.heads), view<const T>(k, shape.kv_heads),
                                view<const T>(v, shape.kv_heads), view<T>(out, shape.heads), lse.data(), room.get()});
  }
  void backward(ThreadPool& pool, bool accumulate = false) {
    const auto room = scratch(attention_backward_scratch_bytes(shape, pool.threads(), sizeof(T)));
    attention_backward<T>(pool, {.shape = shape,
                                 .q = view<const T>(q, shape.heads),
                                 .k = view<const T>(k, shape.kv_heads),
                                 .v = view<const T>(v, shape.kv_heads),
                                 .out = view<const T>(out, shape.heads),
                                 .dout = view<const T>(dout, shape.heads),
                                 .log_sum_exp = lse.data(),
                                 .dq = view<T>(dq, shape.heads),
                                 .dk = view<T>(dk, shape.kv_heads),
                                 .dv = view<T>(dv, shape.kv_heads),
                                 .accumulate_dq = accumulate,
                                 .accumulate_dk = accumulate,
                                 .accumulate_dv = accumulate,
                                 .scratch = room.get()});
  }
};

/// Textbook attention with the full matrix of probabilities, and its gradients by the chain rule.
void naive(Case<double>& c) {
  const AttentionShape& s = c.shape;
  const std::size_t S = s.positions, D = s.dim, group = s.heads / s.kv_heads;
  const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(D));
  c.out.assign(c.nq, 0), c.dq.assign(c.nq, 0), c.dk.assign(c.nk, 0), c.dv.assign(c.nk, 0);
  std::vector<double> p(S * S), dp(S * S);
  for (std::size_t b = 0; b < s.batch; ++b)
    for (std::size_t h = 0; h < s.heads; ++h) {
      const auto qi = [&](std::size_t t, std::size_t d) { return ((b * S + t) * s.heads + h) * D + d; };
      const auto ki = [&](std::size_t t, std::size_t d) { return ((b * S + t) * s.kv_heads + h / group) * D + d; };
      for (std::size_t i = 0; i < S; ++i) {
        const std::size_t seen = s.causal ? i + 1 : S;
        double sum = 0, max = -INFINITY, row = 0;
        for (std::size_t j = 0; j < seen; ++j) {
          double score = 0, dot = 0;
          for (std::size_t d = 0; d < D; ++d)
            score += c.q[qi(i, d)] * c.k[ki(j, d)], dot += c.dout[qi(i, d)] * c.v[ki(j, d)];
          p[i * S + j] = score * scale, dp[i * S + j] = dot;
          max = std::max(max, p[i * S + j]);
        }
        for (std::size_t j = 0; j < seen; ++j) sum += p[i * S + j] = std::exp(p[i * S + j] - max);
        c.lse[(b * s.heads + h) * S + i] = max + std::log(sum);
        for (std::size_t j = 0; j < seen; ++j) row += (p[i * S + j] /= sum) * dp[i * S + j];
        for (std::size_t j = 0; j < seen; ++j) {
          const double ds = p[i * S + j] * (dp[i * S + j] - row) * scale;
          for (std::size_t d = 0; d < D; ++d) {
            c.out[qi(i, d)] += p[i * S + j] * c.v[ki(j, d)];
            c.dv[ki(j, d)] += p[i * S + j] * c.dout[qi(i, d)];
            c.dq[qi(i, d)] += ds * c.k[ki(j, d)];
            c.dk[ki(j, d)] += ds * c.q[qi(i, d)];
          }
        }
      }
    }
}

const AttentionShape kShapes[] = {{1, 1, 1, 1, 1},
                                  {2, 2, 2, 1, 5},
                                  {1, 17, 4, 2, 7},
                                  {2, 17, 3, 3, 13},
                                  {1, 64, 2, 2, 16},
                                  {1, 65, 2, 1, 33},
                                  {2, 65, 4, 4, 64},
                                  {1, 130, 6, 2, 8},
                                  {1, 130, 2, 2, 20, 0.3},
                                  {1, 200, 3, 1, 64},
                                  {1, 1, 1, 1, 1, 0, false},
                                  {2, 17, 4, 2, 7, 0, false},
                                  {1, 64, 2, 2, 16, 0, false},
                                  {2, 65, 2, 1, 33, 0.2, false},
                                  {1, 200, 3, 1, 64, 0, false}};

TEST(Attention, EqualsTextbook) {
  ThreadPool pool(2);
  for (const AttentionShape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.positions << " positions, heads " << shape.heads << "/" << shape.kv_heads
                                    << " of " << shape.dim);
    Case<double> expected(shape), c(shape);
    Case<float> f(shape);
    naive(expected);
    c.forward(pool);
    c.backward(pool);
    EXPECT_LT(relative_difference(c.out, expected.out), 1e-13);
    EXPECT_LT(relative_difference(c.lse, expected.lse), 1e-13);
    EXPECT_LT(relative_difference(c.dv, expected.dv), 1e-13);
    if (shape.positions > 1) {
      EXPECT_LT(relative_difference(c.dq, expected.dq), 1e-12);
      EXPECT_LT(relative_difference(c.dk, expected.dk), 1e-12);
    }
    f.forward(pool);
    f.backward(pool);
    EXPECT_LT(relative_difference(f.out, expected.out), 3e-6);
    EXPECT_LT(relative_difference(f.dv, expected.dv), 3e-6);
    if (shape.positions > 1) {
      EXPECT_LT(relative_difference(f.dq, expected.dq), 2e-5);
      EXPECT_LT(relative_difference(f.dk, expected.dk), 2e-5);
    }
  }
}

TEST(Attention, GradientsEqualFiniteDifferences) {
  ThreadPool pool;
  for (const AttentionShape& shape :
       {AttentionShape{1, 2, 2, 1, 5}, {1, 17, 4, 2, 3}, {1, 66, 2, 1, 2}, {1, 66, 2, 1, 2, 0, false}}) {
    Case<double> c(shape);
    const auto loss = [&] {
      c.forward(pool);
      return dot(c.out, c.dout);
    };
    const auto eq = differences(c.q, loss), ek = differences(c.k, loss), ev = differences(c.v, loss);
    c.forward(pool);
    c.backward(pool);
    EXPECT_LT(relative_difference(c.dq, eq), kGradientTolerance);
    EXPECT_LT(relative_difference(c.dk, ek), kGradientTolerance);
    EXPECT_LT(relative_difference(c.dv, ev), kGradientTolerance);
    const auto dq = c.dq, dk = c.dk, dv = c.dv;
    c.dq.assign(c.nq, 1.0), c.dk.assign(c.nk, 2.0), c.dv.assign(c.nk, 3.0);
    c.backward(pool, true);
    EXPECT_LT(relative_difference(c.dq, plus(std::vector<double>(c.nq, 1.0), dq)), 1e-14);
    EXPECT_LT(relative_difference(c.dk, plus(std::vector<double>(c.nk, 2.0), dk)), 1e-14);
    EXPECT_LT(relative_difference(c.dv, plus(std::vector<double>(c.nk, 3.0), dv)), 1e-14);
  }
}

// A change at position t must change no output before t (and does change the one at t).
TEST(Attention, IsCausal) {
  ThreadPool pool;
  Case<float> c({1, 130, 2, 2, 16});
  c.forward(pool);
  for (const std::size_t t : {1u, 63u, 64u, 100u, 129u}) {
    Case<float> changed = c;
    for (std::size_t i = 0; i < 32; ++i) changed.k[t * 32 + i] = changed.v[t * 32 + i] = 1000.0f;
    changed.forward(pool);
    const auto before = static_cast<long>(t * 32);
    EXPECT_TRUE(same_bits(std::vector<float>(changed.out.begin(), changed.out.begin() + before),
                          std::vector<float>(c.out.begin(), c.out.begin() + before)))
        << t;
    EXPECT_NE(changed.out[t * 32], c.out[t * 32]);
  }
}

// Without the mask, every output depends on every key, also in later blocks.
TEST(Attention, WithoutMaskSeesAllKeys) {
  ThreadPool pool;
  Case<float> c({1, 130, 2, 2, 16, 0, false});
  c.forward(pool);
  for (const std::size_t t : {0u, 63u, 64u, 129u}) {
    Case<float> changed = c;
    for (std::size_t i = 0; i < 32; ++i) changed.v[t * 32 + i] += 1000.0f;
    changed.forward(pool);
    for (std::size_t i = 0; i < c.out.size(); ++i) ASSERT_NE(changed.out[i], c.out[i]) << t << ' ' << i;
  }
}

TEST(Attention, BitsForOneTwoAndThreeThreads) {
  const auto run = [](std::size_t threads) {
    ThreadPool pool(threads);
    Case<float> c({2, 130, 4, 2, 24});
    c.forward(pool);
    c.backward(pool);
    std::vector<float> all = c.out;
    for (const auto* x : {&c.lse, &c.dq, &c.dk, &c.dv}) all.insert(all.end(), x->begin(), x->end());
    return all;
  };
  const auto one = run(1);
  EXPECT_TRUE(same_bits(run(2), one));
  EXPECT_TRUE(same_bits(run(3), one));
}

TEST(Attention, FusedBufferIsBitwiseEqual) {
  ThreadPool pool(2);
  const AttentionShape shape{2, 70, 3, 3, 16};
  const std::size_t P = shape.positions, H = shape.heads, D = shape.dim;
  Case<float> c(shape);
  c.forward(pool);
  c.backward(pool);
  std::vector<float> qkv(3 * c.nq), dqkv(3 * c.nq, NAN), out(c.nq), lse(c.lse.size());
  const std::vector<float>* parts[] = {&c.q, &c.k, &c.v};
  for (std::size_t row = 0; row < shape.batch * P; ++row)
    for (std::size_t part = 0; part < 3; ++part)
      std::copy_n(parts[part]->begin() + static_cast<long>(row * H * D), H * D,
                  qkv.begin() + static_cast<long>((row * 3 + part) * H * D));
  const float* in = qkv.data();
  const auto room =
      scratch(attention_backward_scratch_bytes(shape, 2, 4) + attention_forward_scratch_bytes(shape, 2, 4));
  attention_forward<float>(
      pool, {shape, fused_qkv_view(in, 0, P, H, D), fused_qkv_view(in, 1, P, H, D), fused_qkv_view(in, 2, P, H, D),
             heads_view(out.data(), P, H, D), lse.data(), room.get()});
  EXPECT_TRUE(same_bits(out, c.out) && same_bits(lse, c.lse));
  attention_backward<float>(pool, {.shape = shape,
                                   .q = fused_qkv_view(in, 0, P, H, D),
                                   .k = fused_qkv_view(in, 1, P, H, D),
                                   .v = fused_qkv_view(in, 2, P, H, D),
                                   .out = c.view<const float>(c.out, H),
                                   .dout = c.view<const float>(c.dout, H),
                                   .log_sum_exp = lse.data(),
                                   .dq = fused_qkv_view(dqkv.data(), 0, P, H, D),
                                   .dk = fused_qkv_view(dqkv.data(), 1, P, H, D),
                                   .dv = fused_qkv_view(dqkv.data(), 2, P, H, D),
                                   .scratch = room.get()});
  const std::vector<float>* gradients[] = {&c.dq, &c.dk, &c.dv};
  for (std::size_t row = 0; row < shape.batch * P; ++row)
    for (std::size_t part = 0; part < 3; ++part)
      for (std::size_t i = 0; i < H * D; ++i)
        ASSERT_EQ(dqkv[(row * 3 + part) * H * D + i], (*gradients[part])[row * H * D + i]);
}

// 8,192 positions: scratch stays under 512 KiB a thread (backward: plus 4 bytes a row and head), and no kernel writes
// beyond the stated size. A matrix of 8192 x 8192 would be 256 MiB.
TEST(Attention, EightThousandPositionsStayBelowStatedBytes) {
  ThreadPool pool(2);
  AttentionShape shape{1, 8192, 2, 1, 64};
  EXPECT_LE(attention_forward_scratch_bytes(shape, 2, 4), 2u * 512 * 1024);
  EXPECT_LE(attention_backward_scratch_bytes(shape, 2, 4), 2u * 512 * 1024 + 8192 * 2 * 4 + 64);
  EXPECT_GT(std::size_t{8192} * 8192 * 4, 200 * attention_backward_scratch_bytes(shape, 2, 4));
  shape.dim = 16;  // the run itself uses small heads, so that sanitizers can run it, too
  const std::size_t forward = attention_forward_scratch_bytes(shape, 2, 4),
                    backward = attention_backward_scratch_bytes(shape, 2, 4);
  AttentionShape shorter = shape;
  shorter.positions = 64;
  EXPECT_EQ(attention_forward_scratch_bytes(shorter, 2, 4), forward) << "must not grow with the positions";

  Case<float> c(shape);
  constexpr std::size_t kGuard = 4096;
  const auto room = scratch(backward + kGuard);
  auto* guard = static_cast<unsigned char*>(room.get()) + backward;
  const auto view = [&](auto& x, std::size_t heads) { return c.view<const float>(x, heads); };
  attention_forward<float>(
      pool, {shape, view(c.q, 2), view(c.k, 1), view(c.v, 1), c.view<float>(c.out, 2), c.lse.data(), room.get()});
  attention_backward<float>(pool, {.shape = shape,
                                   .q = view(c.q, 2),
                                   .k = view(c.k, 1),
                                   .v = view(c.v, 1),
                                   .out = view(c.out, 2),
                                   .dout = view(c.dout, 2),
                                   .log_sum_exp = c.lse.data(),
                                   .dq = c.view<float>(c.dq, 2),
                                   .dk = c.view<float>(c.dk, 1),
                                   .dv = c.view<float>(c.dv, 1),
                                   .scratch = room.get()});
  for (std::size_t i = 0; i < kGuard; ++i) ASSERT_EQ(guard[i], 0xff) << "written beyond the stated scratch";
  for (const float x : c.dq) ASSERT_FALSE(std::isnan(x));
}

TEST(Attention, RejectsIndivisibleHeads) {
  ThreadPool pool;
  EXPECT_THROW(attention_forward<float>(pool, {.shape = {1, 1, 3, 2, 4}}), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::kernels
