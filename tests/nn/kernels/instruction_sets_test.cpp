// Every instruction set of this build and this machine must give right results, and those with fused multiply-adds the
// same bits: the order of sums does not depend on the vector width.
#include <array>
#include <map>
#include <string>

#include "hwy/targets.h"
#include "tessera/nn/kernels/activation.h"
#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/kernels/cross_entropy.h"
#include "tessera/nn/kernels/norm.h"
#include "tessera/nn/kernels/optimizer.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

class InstructionSets : public testing::Test {
 protected:
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }

  /// Result of run() under each instruction set of this machine.
  template <class Run>
  auto under_each(Run run) {
    hwy::SetSupportedTargetsForTest(0);
    const std::int64_t supported = hwy::SupportedTargets();
    std::map<std::int64_t, decltype(run())> results;
    for (const std::int64_t target : {static_cast<std::int64_t>(HWY_AVX3), static_cast<std::int64_t>(HWY_AVX2), static_cast<std::int64_t>(HWY_SCALAR)}) {
      if (target != HWY_SCALAR && (supported & target) == 0) continue;
      hwy::SetSupportedTargetsForTest(target);
      results.emplace(target, run());
    }
    return results;
  }

  /// All agree to `tolerance`, those with fused multiply-adds bitwise.
  template <class Results>
  void expect_agreement(const Results& results, double tolerance) {
    const auto& scalar = results.at(HWY_SCALAR);
    for (const auto& [target, result] : results) {
      EXPECT_LT(relative_difference(result, scalar), tolerance) << hwy::TargetName(target);
      if (target != HWY_SCALAR && results.count(HWY_AVX2)) {
        EXPECT_TRUE(same_bits(result, results.at(HWY_AVX2))) << hwy::TargetName(target);
      }
    }
  }
};

TEST_F(InstructionSets, RandomNumbersAreBitwiseEqual) {
  const auto results = under_each([] { return random_vector<float>(10007, 3); });
  for (const auto& [target, result] : results) EXPECT_TRUE(same_bits(result, results.at(HWY_SCALAR))) << hwy::TargetName(target);
}

// The control: code with fused multiply-adds differs from code without, so another path really ran.
TEST_F(InstructionSets, DetectUnchangedPath) {
  ThreadPool pool;
  const auto x = random_vector<float>(1000, 1);
  const auto results = under_each([&] {
    std::vector<float> y(1000);
    activation_forward(pool, Activation::gelu_tanh, x.data(), y.data(), 1000);
    return y;
  });
  expect_agreement(results, 1e-6);
  if (results.count(HWY_AVX2)) {
    EXPECT_FALSE(same_bits(results.at(HWY_AVX2), results.at(HWY_SCALAR)));
  }
}

TEST_F(InstructionSets, LayerNormAndCrossEntropy) {
  ThreadPool pool;
  const std::size_t rows = 9, width = 77;
  const auto x = random_vector<float>(rows * width, 1), weight = random_vector<float>(width, 2), dy = random_vector<float>(rows * width, 3);
  const std::vector<std::int32_t> targets(rows, 5);
  expect_agreement(under_each([&] {
    std::vector<float> all(3 * rows * width + 2 * width), mean(rows), rstd(rows), max(rows), sum(rows);
    float* at = all.data();
    layer_norm_forward<float>(pool, {.rows = rows, .width = width, .x = x.data(), .weight = weight.data(), .bias = weight.data(), .y = at,
                                     .mean = mean.data(), .rstd = rstd.data()});
    at += rows * width;
    layer_norm_backward<float>(pool, {.rows = rows, .width = width, .x = x.data(), .weight = weight.data(), .mean = mean.data(),
                                      .rstd = rstd.data(), .dy = dy.data(), .dx = at, .dweight = at + rows * width,
                                      .dbias = at + (rows + 1) * width});
    at += (rows + 2) * width;
    cross_entropy_forward<float>(pool, {.logits = x.data(), .targets = targets.data(), .rows = rows, .vocabulary = width,
                                        .row_max = max.data(), .row_sum = sum.data()});
    cross_entropy_backward<float>(pool, {.logits = x.data(), .targets = targets.data(), .rows = rows, .vocabulary = width,
                                         .row_max = max.data(), .row_sum = sum.data(), .dlogits = at});
    return all;
  }), 1e-5);
}

TEST_F(InstructionSets, Attention) {
  ThreadPool pool;
  const AttentionShape shape{1, 130, 2, 1, 20};
  const std::size_t P = shape.positions, D = shape.dim;
  const auto q = random_vector<float>(P * 2 * D, 1), k = random_vector<float>(P * D, 2), v = random_vector<float>(P * D, 3);
  const auto dout = random_vector<float>(P * 2 * D, 4);
  expect_agreement(under_each([&] {
    std::vector<float> out(P * 2 * D), lse(2 * P), dq(P * 2 * D), dk(P * D), dv(P * D);
    const auto room = scratch(attention_backward_scratch_bytes(shape, 1, 4));
    const auto view = [&](auto& x, std::size_t heads) { return heads_view(x.data(), P, heads, D); };
    const HeadsView<const float> qv = view(q, 2), kv = view(k, 1), vv = view(v, 1), dov = view(dout, 2);
    attention_forward<float>(pool, {shape, qv, kv, vv, view(out, 2), lse.data(), room.get()});
    attention_backward<float>(pool, {.shape = shape, .q = qv, .k = kv, .v = vv, .out = view(std::as_const(out), 2), .dout = dov,
                                     .log_sum_exp = lse.data(), .dq = view(dq, 2), .dk = view(dk, 1), .dv = view(dv, 1),
                                     .scratch = room.get()});
    std::vector<float> all = out;
    for (const auto* part : {&lse, &dq, &dk, &dv}) all.insert(all.end(), part->begin(), part->end());
    return all;
  }), 1e-5);
}

TEST_F(InstructionSets, AdamW) {
  ThreadPool pool;
  const auto g = random_vector<float>(133, 2);
  expect_agreement(under_each([&] {
    std::vector<float> p = random_vector<float>(133, 1), m(133), v(133);
    for (std::uint64_t step = 1; step <= 5; ++step)
      adam_step<float>(pool, {.parameter = p.data(), .gradient = g.data(), .first_moment = m.data(), .second_moment = v.data(),
                              .count = 133, .step = step, .weight_decay = 0.1});
    return p;
  }), 1e-6);
}

}  // namespace
}  // namespace tessera::nn::kernels
