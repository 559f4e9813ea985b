// The emulation of asynchronous copies, matrix loads and turns of blocks: right kernels pass and wrong ones fail.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/nn/ops/cuda/emulation.h"
//
#include "tessera/nn/kernels/cuda/fragments.cuh"
#include "tessera/nn/kernels/cuda/math.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"

namespace tessera::nn::cuda {
namespace {

using emulation::Failure;
using emulation::Order;
constexpr Order kAllOrders[] = {Order::ascending, Order::descending, Order::first_warp_ahead, Order::last_warp_ahead};

/// What a pipeline of two stages leaves out.
enum class Fault { none, wait, barrier, commit };

/// Sums four tiles of 64 x 4 numbers over all threads' tiles, each of which the next thread has loaded.
template <Fault fault>
void pipeline(const float* in, float* out) {
  float* room = shared_memory<float>();
  const unsigned mine = thread_index() * 4, other = (thread_index() + 40) % thread_count() * 4;
  const auto load = [&](unsigned tile) {
    copy_async(room + tile % 2 * 256 + mine, in + tile * 256 + mine, tile < 3);
    if (fault != Fault::commit) commit_copies();
  };
  load(0);
  float sum = 0;
  for (unsigned tile = 0; tile < 4; ++tile) {
    if (fault != Fault::wait) wait_copies<0>();
    if (fault != Fault::barrier) sync_block();
    if (tile + 1 < 4) load(tile + 1);
    for (unsigned i = 0; i < 4; ++i) sum += room[tile % 2 * 256 + other + i];
  }
  commit_copies();
  wait_copies<0>();
  out[thread_index()] = sum;
}

/// True if the pipeline gives the right sums in every order of threads.
template <Fault fault>
bool pipeline_is_right() {
  alignas(16) float in[4 * 256];
  for (unsigned i = 0; i < 1024; ++i) in[i] = static_cast<float>(i);
  bool right = true;
  for (const Order order : kAllOrders) {
    float out[64] = {};
    emulation::block().order = order;
    launch(nullptr, {.blocks = 1, .threads = 64, .shared = 2 * 256 * sizeof(float)}, pipeline<fault>, +in, +out);
    for (unsigned t = 0; t < 64; ++t) {
      float expected = 0;  // the last tile is zeros
      for (unsigned tile = 0; tile < 3; ++tile)
        for (unsigned i = 0; i < 4; ++i) expected += in[tile * 256 + (t + 40) % 64 * 4 + i];
      right = right && out[t] == expected;
    }
  }
  emulation::block().order = Order::ascending;
  return right;
}

TEST(EmulatedCopies, ArriveAfterWaitAndBarrier) { EXPECT_TRUE(pipeline_is_right<Fault::none>()); }

TEST(EmulatedCopies, DetectMissingWait) { EXPECT_FALSE(pipeline_is_right<Fault::wait>()); }
TEST(EmulatedCopies, DetectMissingCommit) { EXPECT_FALSE(pipeline_is_right<Fault::commit>()); }
TEST(EmulatedCopies, DetectMissingBarrier) { EXPECT_FALSE(pipeline_is_right<Fault::barrier>()); }

/// With one group pending, the older of two has arrived and the newer one has not.
TEST(EmulatedCopies, WaitForAllButTheLastGroups) {
  alignas(16) static float in[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float out[3] = {};
  launch(
      nullptr, {.threads = 1, .shared = 32},
      +[](float* result) {
        float* room = shared_memory<float>();
        copy_async(room, in, true);
        commit_copies();
        copy_async(room + 4, in + 4, true);
        commit_copies();
        wait_copies<1>();
        result[0] = room[3];
        result[1] = room[4];
        wait_copies<0>();
        result[2] = room[4];
      },
      +out);
  EXPECT_EQ(out[0], 4);
  EXPECT_TRUE(std::isnan(out[1])) << "its place is poisoned";
  EXPECT_EQ(out[2], 5);
}

template <class Kernel>
std::string failure(Kernel kernel) {
  try {
    launch(nullptr, {.blocks = 2, .threads = 32, .shared = 1024}, +kernel);
  } catch (const Failure& error) {
    return error.what();
  }
  return "none";
}

alignas(16) float numbers[8] = {};
std::uint32_t counter = 0;

TEST(EmulatedCopies, RejectWhatTheInstructionRejects) {
  EXPECT_THAT(failure([] { copy_async(shared_memory<float>() + 1, numbers, true); }), testing::HasSubstr("aligned"));
  EXPECT_THAT(failure([] { copy_async(shared_memory<float>(), numbers + 2, true); }), testing::HasSubstr("aligned"));
  EXPECT_THAT(failure([] { copy_async(shared_memory<float>(), numbers, true); }),
              testing::HasSubstr("without waiting for its asynchronous copies"));
  EXPECT_THAT(failure([] { load_matrices<false>(shared_memory<bf16>() + 4); }), testing::HasSubstr("aligned"));
}

TEST(EmulatedTurns, LaterBlocksCanWaitOnlyForEarlierOnes) {
  counter = 0;
  EXPECT_EQ(failure([] {
              if (thread_index() != 0) return;
              await_turn(&counter, static_cast<std::uint32_t>(block_index()));
              pass_turn(&counter, static_cast<std::uint32_t>(block_index()) + 1);
            }),
            "none");
  EXPECT_EQ(counter, 2U);
  counter = 0;
  EXPECT_THAT(failure([] {
                if (thread_index() == 0) await_turn(&counter, 1 - static_cast<std::uint32_t>(block_index()));
              }),
              testing::HasSubstr("waits for turn 1 of a block that begins after it"));
}

/// Products of fragments, loaded from matrices that are stored either way, against sums in f64.
template <bool left_columns, bool right_columns>
void multiply(float* out) {
  constexpr unsigned kLine = 24;
  bf16* a = shared_memory<bf16>();
  bf16* b = a + 16 * kLine;
  const auto value = [](unsigned i, unsigned k) { return bf16(static_cast<float>((i * 7 + k * 5) % 11) - 4); };
  for (unsigned i = thread_index(); i < 256; i += kWarp) {
    const unsigned row = i / 16, column = i % 16;
    a[row * kLine + column] = left_columns ? value(column, row) : value(row, column);
    b[row * kLine + column] = right_columns ? value(row, column + 3) : value(column, row + 3);
  }
  sync_block();
  const LeftFragment left = left_columns ? left_fragment_of_columns(a, kLine) : left_fragment(a, kLine);
  const RightFragments right = right_columns ? right_fragments_of_columns(b, kLine) : right_fragments(b, kLine);
  for (unsigned half = 0; half < 2; ++half) {
    Accumulator sums = {};
    multiply_add<bf16>(sums, left, right.v[half]);
    for (unsigned e = 0; e < 4; ++e)
      out[(lane_group() + e / 2 * 8) * 16 + half * 8 + lane_pair() * 2 + e % 2] = sums.v[e];
  }
}

template <bool left_columns, bool right_columns>
void check_products() {
  float out[256] = {};
  launch(nullptr, {.threads = 32, .shared = 2 * 16 * 24 * sizeof(bf16)}, multiply<left_columns, right_columns>, +out);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += ((i * 7 + k * 5) % 11 - 4) * ((j * 7 + (k + 3) * 5) % 11 - 4);
      EXPECT_EQ(out[i * 16 + j], sum) << i << " " << j;
    }
}

TEST(EmulatedMatrices, GiveTheFragmentsOfProducts) {
  check_products<false, false>();
  check_products<false, true>();
  check_products<true, false>();
  check_products<true, true>();
}

TEST(EmulatedExp2, IsAsFarOffAsTheInstructionMayBe) {
  double worst = 0;
  for (int i = -126 * 64; i < 127 * 64; ++i) {
    const float x = static_cast<float>(i) / 64 + 1e-3F;
    const double exact = std::exp2(static_cast<double>(x));
    if (exact < 0x1p-126) continue;
    worst = std::max(worst, std::abs(static_cast<double>(fast_exp2(x)) / exact - 1));
  }
  EXPECT_LE(worst, 0x1p-22);
  EXPECT_GT(worst, 0x1p-23) << "a test of a kernel includes the instruction's error";
  EXPECT_EQ(fast_exp2(minus_infinity<float>()), 0);
  EXPECT_EQ(fast_exp2(-127), 0) << "no subnormal numbers";
  EXPECT_TRUE(std::isnan(fast_exp2(not_a_number(0.0F))));
}

TEST(EmulatedReciprocal, IsAsFarOffAsTheInstructionMayBe) {
  double worst = 0;
  for (int i = 1; i < 4096; ++i) {
    const float x = static_cast<float>(i) * 0.037F;
    worst = std::max(worst, std::abs(static_cast<double>(fast_reciprocal(x)) * x - 1));
  }
  EXPECT_LE(worst, 0x1p-22);
  EXPECT_GT(worst, 0x1p-23) << "a test of a kernel includes the instruction's error";
  EXPECT_EQ(fast_reciprocal(-minus_infinity<float>()), 0);
  EXPECT_EQ(fast_reciprocal(0x1p127F), 0) << "no subnormal numbers";
  EXPECT_TRUE(std::isnan(fast_reciprocal(not_a_number(0.0F))));
}

/// The last block of a slice that arrives at the counter combines the others' partial norms.
TEST(NormParts, CountersNameLastBlock) {
  const std::vector<float> x(2 * (3 * kNormTile + 1), 1.0F);
  const auto parts = [&](std::uint32_t begun) {
    std::vector<std::uint32_t> counters(2, begun);
    std::vector<double> out(2, -1.0), scratch(2 * 4);
    const NormParts<float> args{
        .x = x.data(), .count = x.size() / 2, .slices = 2, .counters = counters.data(), .out = out.data()};
    EXPECT_EQ(norm_scratch(args), scratch.size() * sizeof(double));
    norm_parts(nullptr, args, scratch.data());
    return out;
  };
  for (const Order order : kAllOrders) {
    emulation::block().order = order;
    EXPECT_EQ(parts(0), std::vector<double>(2, 3 * kNormTile + 1));
    // The controls: one too many combines before the last block has written; none comes last.
    EXPECT_NE(parts(1), parts(0));
    EXPECT_EQ(parts(4), std::vector<double>(2, -1.0));
  }
  emulation::block().order = Order::ascending;
}

}  // namespace
}  // namespace tessera::nn::cuda
