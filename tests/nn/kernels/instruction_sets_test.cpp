// Every instruction set of this build and this machine must give the same bits: the order of sums does not depend on
// the vector width, and those without fused multiply-adds compute them by the standard library.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "hwy/targets.h"
#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/gemm.h"
#include "tessera/nn/kernels/norm.h"
#include "tessera/nn/kernels/optimizer.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

/// What the compiler's code requires anyway, which is the last choice: no instruction set, or SSE2 since Highway 1.1.
constexpr std::int64_t kOldest = HWY_STATIC_TARGET;

class InstructionSets : public testing::Test {
 protected:
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  /// Result of run() under each instruction set of this machine.
  template <class Run>
  auto under_each(Run run) {
    hwy::SetSupportedTargetsForTest(0);
    const std::int64_t supported = hwy::SupportedTargets();
    std::map<std::int64_t, decltype(run())> results;
    for (const std::int64_t target :
         {static_cast<std::int64_t>(HWY_AVX3), static_cast<std::int64_t>(HWY_AVX2), kOldest}) {
      if (target != kOldest && (supported & target) == 0) continue;
      hwy::SetSupportedTargetsForTest(target);
      results.emplace(target, run());
    }
    return results;
  }

  template <class Results>
  void expect_agreement(const Results& results) {
    const auto& oldest = results.at(kOldest);
    for (const auto& [target, result] : results) EXPECT_TRUE(same_bits(result, oldest)) << hwy::TargetName(target);
  }
};

TEST_F(InstructionSets, RandomNumbersAreBitwiseEqual) {
  const auto results = under_each([] { return random_vector<float>(10007, 3); });
  for (const auto& [target, result] : results)
    EXPECT_TRUE(same_bits(result, results.at(kOldest))) << hwy::TargetName(target);
}

TEST_F(InstructionSets, Activations) {
  ThreadPool pool;
  const auto x = random_vector<float>(1000, 1);
  for (const Activation kind : {Activation::gelu_tanh, Activation::gelu_erf, Activation::silu})
    expect_agreement(under_each([&] {
      std::vector<float> y(1000);
      activation_forward(pool, kind, x.data(), y.data(), 1000);
      return y;
    }));
}

template <class T>
std::vector<T> own_product(std::size_t m, std::size_t n, std::size_t k) {
  ThreadPool pool;
  std::vector<T> a, b, c(m * n);
  for (const float x : random_vector<float>(m * k, 1)) a.push_back(static_cast<T>(x));
  for (const float x : random_vector<float>(k * n, 2)) b.push_back(static_cast<T>(x));
  gemm<T>(pool, {.trans_b = Transpose::yes, .m = m, .n = n, .k = k, .a = a.data(), .b = b.data(), .c = c.data()},
          Products::own);
  return c;
}

TEST_F(InstructionSets, OwnProducts) {
  expect_agreement(under_each([] { return own_product<float>(50, 77, 300); }));
  expect_agreement(under_each([] { return own_product<double>(50, 77, 300); }));
  expect_agreement(under_each([] { return own_product<base::bf16>(50, 77, 300); }));
  expect_agreement(under_each([] { return own_product<base::f16>(50, 77, 300); }));
}

// The control: another path really ran, since without vectors a product takes several times as long. The fastest of ten
// is compared, as other programs may interrupt the others.
TEST_F(InstructionSets, DetectUnchangedPath) {
  const auto seconds = under_each([] {
    double fastest = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 10; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      own_product<float>(200, 200, 200);
      fastest = std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return fastest;
  });
  if (seconds.count(HWY_AVX2)) {
    EXPECT_GT(seconds.at(kOldest), 2 * seconds.at(HWY_AVX2));
  }
}

// Processors differ in which operand a minimum returns if one is NaN.
TEST_F(InstructionSets, NanStaysWhereItIs) {
  ThreadPool pool;
  const std::size_t count = 37, at = 20;
  auto x = random_vector<float>(count, 1);
  x[at] = std::numeric_limits<float>::quiet_NaN();
  for (const Activation kind : {Activation::relu, Activation::gelu_tanh, Activation::gelu_erf, Activation::silu}) {
    for (const auto& [target, y] : under_each([&] {
           std::vector<float> made(count);
           activation_forward(pool, kind, x.data(), made.data(), count);
           return made;
         }))
      for (std::size_t i = 0; i < count; ++i)
        EXPECT_EQ(std::isnan(y[i]), i == at) << hwy::TargetName(target) << " " << i;
  }
}

TEST_F(InstructionSets, NanReachesAllThatDependsOnIt) {
  ThreadPool pool;
  const std::size_t count = 37, at = 20;
  const auto g = random_vector<float>(count, 2);
  for (const auto& [target, largest] : under_each([&] {
         std::vector<float> p = random_vector<float>(count, 1), m(count), v(count), max(count);
         v[at] = std::numeric_limits<float>::quiet_NaN();
         adam_step<float>(pool, {.parameter = p.data(),
                                 .gradient = g.data(),
                                 .first_moment = m.data(),
                                 .second_moment = v.data(),
                                 .max_second_moment = max.data(),
                                 .count = count,
                                 .step = 1});
         return max;
       }))
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ(std::isnan(largest[i]), i == at) << hwy::TargetName(target) << " " << i;

  const std::vector<std::int32_t> targets(3, 5);
  for (const auto& [target, sums] : under_each([&] {
         auto x = random_vector<float>(3 * count, 1);
         x[count + at] = std::numeric_limits<float>::quiet_NaN();
         std::vector<float> max(3), sum(3);
         cross_entropy_forward<float>(pool, {.logits = x.data(),
                                             .targets = targets.data(),
                                             .rows = 3,
                                             .vocabulary = count,
                                             .row_max = max.data(),
                                             .row_sum = sum.data()});
         return sum;
       }))
    for (std::size_t i = 0; i < sums.size(); ++i)
      EXPECT_EQ(std::isnan(sums[i]), i == 1) << hwy::TargetName(target) << " " << i;
}

TEST_F(InstructionSets, LayerNormAndCrossEntropy) {
  ThreadPool pool;
  const std::size_t rows = 9, width = 77;
  const auto x = random_vector<float>(rows * width, 1), weight = random_vector<float>(width, 2),
             dy = random_vector<float>(rows * width, 3);
  const std::vector<std::int32_t> targets(rows, 5);
  expect_agreement(under_each([&] {
    std::vector<float> all(3 * rows * width + 2 * width), mean(rows), rstd(rows), max(rows), sum(rows);
    float* at = all.data();
    norm_forward<float>(pool, {.rows = rows,
                               .width = width,
                               .x = x.data(),
                               .weight = weight.data(),
                               .bias = weight.data(),
                               .y = at,
                               .mean = mean.data(),
                               .rstd = rstd.data()});
    at += rows * width;
    norm_backward<float>(pool, {.rows = rows,
                                .width = width,
                                .x = x.data(),
                                .weight = weight.data(),
                                .mean = mean.data(),
                                .rstd = rstd.data(),
                                .dy = dy.data(),
                                .dx = at,
                                .dweight = at + rows * width,
                                .dbias = at + (rows + 1) * width});
    at += (rows + 2) * width;
    cross_entropy_forward<float>(pool, {.logits = x.data(),
                                        .targets = targets.data(),
                                        .rows = rows,
                                        .vocabulary = width,
                                        .row_max = max.data(),
                                        .row_sum = sum.data()});
    cross_entropy_backward<float>(pool, {.logits = x.data(),
                                         .targets = targets.data(),
                                         .rows = rows,
                                         .vocabulary = width,
                                         .row_max = max.data(),
                                         .row_sum = sum.data(),
                                         .dlogits = at});
    return all;
  }));
}

TEST_F(InstructionSets, Attention) {
  ThreadPool pool;
  for (const AttentionShape shape : {AttentionShape{1, 130, 2, 1, 20}, {1, 130, 2, 1, 20, 0, false}}) {
    const std::size_t P = shape.positions, D = shape.dim;
    const auto q = random_vector<float>(P * 2 * D, 1), k = random_vector<float>(P * D, 2),
               v = random_vector<float>(P * D, 3);
    const auto dout = random_vector<float>(P * 2 * D, 4);
    expect_agreement(under_each([&] {
      std::vector<float> out(P * 2 * D), lse(2 * P), dq(P * 2 * D), dk(P * D), dv(P * D);
      const auto room = scratch(attention_backward_scratch_bytes(shape, 1, 4));
      const auto view = [&](auto& x, std::size_t heads) { return heads_view(x.data(), P, heads, D); };
      const HeadsView<const float> qv = view(q, 2), kv = view(k, 1), vv = view(v, 1), dov = view(dout, 2);
      attention_forward<float>(pool, {shape, qv, kv, vv, view(out, 2), lse.data(), room.get()});
      attention_backward<float>(pool, {.shape = shape,
                                       .q = qv,
                                       .k = kv,
                                       .v = vv,
                                       .out = view(std::as_const(out), 2),
                                       .dout = dov,
                                       .log_sum_exp = lse.data(),
                                       .dq = view(dq, 2),
                                       .dk = view(dk, 1),
                                       .dv = view(dv, 1),
                                       .scratch = room.get()});
      std::vector<float> all = out;
      for (const auto* part : {&lse, &dq, &dk, &dv}) all.insert(all.end(), part->begin(), part->end());
      return all;
    }));
  }
}

TEST_F(InstructionSets, AdamW) {
  ThreadPool pool;
  const auto g = random_vector<float>(133, 2);
  expect_agreement(under_each([&] {
    std::vector<float> p = random_vector<float>(133, 1), m(133), v(133);
    for (std::uint64_t step = 1; step <= 5; ++step)
      adam_step<float>(pool, {.parameter = p.data(),
                              .gradient = g.data(),
                              .first_moment = m.data(),
                              .second_moment = v.data(),
                              .count = 133,
                              .step = step,
                              .weight_decay = 0.1});
    return p;
  }));
}

}  // namespace
}  // namespace tessera::nn::kernels
