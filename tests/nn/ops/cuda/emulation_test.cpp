// Tests of the emulation: it detects wrong kernels, and right ones pass.
#include "tests/nn/ops/cuda/emulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::cuda {
namespace {

using emulation::Failure;
using emulation::Order;

/// Results of `kernel` over 2 blocks in all orders, one after the other.
template <class Kernel>
std::vector<std::vector<float>> outcomes(unsigned threads, std::size_t shared, Kernel kernel) {
  std::vector<std::vector<float>> all;
  for (const Order order : {Order::ascending, Order::descending, Order::first_warp_ahead, Order::last_warp_ahead}) {
    std::vector<float> out(2 * threads, -1.0F);
    emulation::block().order = order;
    launch(nullptr, {.blocks = 2, .threads = threads, .shared = shared}, +kernel, out.data());
    all.push_back(out);
  }
  emulation::block().order = Order::ascending;
  return all;
}

/// Each thread passes its number to the next one through shared memory.
void pass_on(float* out) {
  float* room = shared_memory<float>();
  room[thread_index()] = static_cast<float>(thread_index());
  sync_block();
  out[block_index() * thread_count() + thread_index()] = room[(thread_index() + 1) % thread_count()];
}
void pass_on_without_barrier(float* out) {
  float* room = shared_memory<float>();
  room[thread_index()] = static_cast<float>(thread_index());
  out[block_index() * thread_count() + thread_index()] = room[(thread_index() + 1) % thread_count()];
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(Emulation, BarrierMakesThreadOrderIrrelevant) {
  const auto all = outcomes(64, 64 * sizeof(float), pass_on);
  for (std::size_t i = 0; i < 128; ++i) EXPECT_EQ(all[0][i], static_cast<float>((i + 1) % 64));
  for (const auto& other : all) EXPECT_TRUE(same_bits(other, all[0]));
}

TEST(Emulation, DetectsMissingBarrier) {
  const auto all = outcomes(64, 64 * sizeof(float), pass_on_without_barrier);
  EXPECT_FALSE(same_bits(all[0], all[1]));
  EXPECT_TRUE(std::isnan(all[0][0])) << "shared memory begins poisoned in every block";
  EXPECT_TRUE(std::isnan(all[0][64]));
}

/// Each block reads what another wrote in the same launch.
void read_other_block(float* out) {
  float* mine = out + block_index() * thread_count();
  const float* others = out + (1 - block_index()) * thread_count();
  mine[thread_index()] = others[thread_index()] + 1.0F;
}

TEST(Emulation, DetectsBlocksThatNeedOneOrder) {
  const auto all = outcomes(64, 0, read_other_block);
  EXPECT_EQ(all[0][0], 0.0F);
  EXPECT_FALSE(same_bits(all[0], all[1]));
}

/// Lanes with the same remainder of 5, and what lanes before them wrote.
TEST(Emulation, LanesWithSameValue) {
  const auto kernel = [](float* out) {
    float* room = shared_memory<float>();
    room[thread_index()] = 0;
    sync_warp();
    const unsigned lane = thread_index() % kWarp, same = lanes_with(lane % 5), before = same & ((1U << lane) - 1);
    if (before == 0) room[thread_index() / kWarp * kWarp + lane % 5] = static_cast<float>(bits_set(same));
    sync_warp();
    out[block_index() * thread_count() + thread_index()] =
        room[thread_index() / kWarp * kWarp + lane % 5] * 100 + static_cast<float>(bits_set(before));
  };
  const auto all = outcomes(64, 64 * sizeof(float), +kernel);
  for (unsigned i = 0; i < 64; ++i) {
    const unsigned lane = i % kWarp;
    EXPECT_EQ(all[0][i], static_cast<float>((lane % 5 < 2 ? 700 : 600) + lane / 5)) << i;
  }
  for (const auto& other : all) EXPECT_TRUE(same_bits(other, all[0]));
}

/// Two sums in the same shared memory. Without the last barrier a fast warp overwrites the first sum with the second.
template <bool last_barrier>
void two_sums(float* out) {
  float* room = shared_memory<float>();
  float total = 0;
  for (int round = 1; round < 3; ++round) {
    const float sum = over_warp(static_cast<float>(round), Add{});
    if (thread_index() % kWarp == 0) room[thread_index() / kWarp] = sum;
    sync_block();
    for (unsigned warp = 0; warp < thread_count() / kWarp; ++warp) total += room[warp];
    if (last_barrier) sync_block();
  }
  out[block_index() * thread_count() + thread_index()] = total;
}

TEST(Emulation, DetectsUnsynchronizedWarp) {
  const auto right = outcomes(96, kReduceRoom<float>, two_sums<true>);
  for (const auto& other : right) EXPECT_EQ(other[5], 3 * 96.0F);
  const auto wrong = outcomes(96, kReduceRoom<float>, two_sums<false>);
  EXPECT_TRUE(same_bits(wrong[0], right[0])) << "in step, all is well";
  EXPECT_FALSE(same_bits(wrong[2], right[0]));
  EXPECT_FALSE(same_bits(wrong[3], right[0]));
}

TEST(Emulation, BlockSumsInOneTree) {
  const auto kernel = [](float* out) {
    const float sum = over_block(1.0F / static_cast<float>(thread_index() + 1), Add{}, shared_memory<float>());
    out[block_index() * thread_count() + thread_index()] = sum;
  };
  const auto all = outcomes(96, kReduceRoom<float>, +kernel);
  for (const auto& other : all) EXPECT_TRUE(same_bits(other, all[0]));
  double expected = 0;
  for (int i = 1; i <= 96; ++i) expected += 1.0 / i;
  for (const float sum : all[0]) EXPECT_NEAR(sum, expected, 1e-5);
}

template <class Kernel>
std::string failure(Kernel kernel) {
  try {
    outcomes(64, 64 * sizeof(float), kernel);
  } catch (const Failure& error) {
    return error.what();
  }
  return "none";
}

TEST(Emulation, RejectsHangingAndOverlappingKernels) {
  EXPECT_EQ(failure(pass_on), "none");
  EXPECT_THAT(failure([](float*) {
                if (thread_index() > 40) sync_block();
              }),
              testing::HasSubstr("23 threads wait for the block, 0 for their warp, 41 have left"));
  EXPECT_THAT(failure([](float* out) {
                if (thread_index() < 7) *out = shuffle_xor(1.0F, 1);
              }),
              testing::HasSubstr("7 for their warp"));
  EXPECT_THAT(failure([](float*) { shared_memory<float>()[thread_index() + 1] = 0; }),
              testing::HasSubstr("beyond its shared memory"));
}

/// One element too many, like an off-by-one error in a kernel's bound.
struct TooFar {
  float* out;
  std::size_t count;
  template <int n>
  void step(std::size_t i) const {
    for (std::size_t e = 0; e <= n && i + e <= count; ++e) out[i + e] = 1.0F;
  }
};

TEST(Emulation, DetectsWriteBeyondArray) {
  static const auto write = [](std::size_t count) {
    test::Array<float> array(std::vector<double>(10, 0.0));
    for_elements<4>(nullptr, count, {array.data()}, TooFar{array.data(), count});
  };
  EXPECT_NONFATAL_FAILURE(write(10), "element 10 of 10 was written");
  write(9);
}

}  // namespace
}  // namespace tessera::nn::cuda
