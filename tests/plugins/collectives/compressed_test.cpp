// Compressed collectives: their result on every rank, and the bytes that the ranks exchange.
#include "plugins/collectives/compressed.h"

#include <cmath>

#include "tests/plugins/collectives/ranks.h"

namespace tessera::collectives {
namespace {

using nn::kernels::compressed_bytes;

const std::vector<nn::Shape> kShapes = {{7, 300}, {301}, {3, 5}};

struct Case {
  World world;
  Compression compression;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.world.ranks << " ranks over " << c.world.backend; }
};

class CompressedCollectives : public testing::TestWithParam<Case> {
 protected:
  Results run(OpKind collective, const std::function<std::vector<float>(Bench&)>& body, bool feedback = false) const {
    const CompressionOptions options{collective, GetParam().compression, feedback};
    return on_ranks(
        GetParam().world, collective, kShapes, [&] { return std::make_unique<CompressedCollective>(options); }, body);
  }
  /// Encodes and decodes.
  std::vector<float> rounded(const std::vector<float>& values) const {
    nn::Context context;
    std::vector<std::byte> wire(compressed_bytes(GetParam().compression, values.size()));
    std::vector<float> back(values.size());
    const nn::kernels::SumCompressedArgs decode{
        .compression = GetParam().compression, .in = wire.data(), .out = back.data(), .count = values.size()};
    context.device_kernels().compress(
        context.stream(), {GetParam().compression, values.data(), base::DType::f32, values.size(), wire.data()});
    context.device_kernels().sum_compressed(context.stream(), decode);
    return back;
  }
  /// Each rank's padded flat parameter; part_of: the slice of `owner`.
  static std::vector<float> values_of(int rank, std::size_t count) {
    return normals("v" + std::to_string(rank), count);
  }
  std::vector<float> part_of(const std::vector<float>& all, int owner) const {
    const std::size_t part = all.size() / static_cast<std::size_t>(GetParam().world.ranks);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(part) * owner;
    return {first, first + static_cast<std::ptrdiff_t>(part)};
  }
  /// The mean of the parts that `owner` receives, in rank order.
  std::vector<float> mean_of_parts(int owner, std::size_t padded) const {
    const int ranks = GetParam().world.ranks;
    std::vector<float> sum;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<float> part = rounded(part_of(values_of(rank, padded), owner));
      sum.resize(part.size(), -0.0F);
      for (std::size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
    }
    for (float& value : sum) value /= static_cast<float>(ranks);
    return sum;
  }
};

TEST_P(CompressedCollectives, GatherIsEqualOnAllRanks) {
  std::size_t padded = 0;
  const Results results = run(OpKind::all_gather, [&](Bench& bench) {
    if (bench.channel().rank() == 0) padded = bench.padded();
    return bench.run(part_of(values_of(0, bench.padded()), bench.channel().rank()));
  });
  std::vector<float> expected;
  for (int rank = 0; rank < GetParam().world.ranks; ++rank) {
    const std::vector<float> part = rounded(part_of(values_of(0, padded), rank));
    expected.insert(expected.end(), part.begin(), part.end());
  }
  for (const auto& result : results) EXPECT_TRUE(same_bits(result, expected));
  EXPECT_FALSE(same_bits(values_of(0, padded), expected)) << "it did round";
}

TEST_P(CompressedCollectives, SumRoundedPartsInRankOrder) {
  std::vector<std::size_t> padded(static_cast<std::size_t>(GetParam().world.ranks));
  const auto body = [&](Bench& bench) {
    const int rank = bench.channel().rank();
    padded[static_cast<std::size_t>(rank)] = bench.padded();
    return bench.run(values_of(rank, bench.padded()), ReduceOp::avg());
  };
  const Results scattered = run(OpKind::reduce_scatter, body);
  const Results reduced = run(OpKind::all_reduce, body);
  std::vector<float> all;
  for (int rank = 0; rank < GetParam().world.ranks; ++rank) {
    const std::vector<float> sum = mean_of_parts(rank, padded[0]);
    EXPECT_TRUE(same_bits(scattered[static_cast<std::size_t>(rank)], sum));
    const std::vector<float> part = rounded(sum);
    all.insert(all.end(), part.begin(), part.end());
  }
  for (const auto& result : reduced) EXPECT_TRUE(same_bits(result, all)) << "the same on all ranks";
}

TEST_P(CompressedCollectives, TrafficEqualsCost) {
  for (const OpKind collective : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce}) {
    run(collective, [&](Bench& bench) {
      const int rank = bench.channel().rank(), ranks = bench.channel().size();
      const std::vector<float> all = values_of(rank, bench.padded());
      const comm::TrafficStats before = bench.channel().traffic();
      bench.run(collective == OpKind::all_gather ? part_of(all, rank) : all);
      bench.channel().barrier().wait();  // then all ranks have read this rank's data
      const comm::TrafficStats moved = bench.channel().traffic() - before;
      const std::uint64_t part = bench.padded() / static_cast<std::size_t>(ranks);
      const std::uint64_t encoded =
          GetParam().compression == Compression::bf16 ? 2 * part : part + 4 * ((part + 255) / 256);
      const std::uint64_t hops = collective == OpKind::all_reduce ? 2 : 1;
      EXPECT_EQ(moved.bytes_sent(), hops * encoded * static_cast<std::uint64_t>(ranks - 1));
      const fsdp::CollectiveCost cost =
          compressed_cost({collective, GetParam().compression}, {bench.padded(), base::DType::f32, ranks});
      EXPECT_EQ(cost.bytes, moved.bytes_sent());
      EXPECT_EQ(cost.calls, moved.calls() - 1);  // without the barrier
      EXPECT_EQ(bench.plugin().stats().sent, moved.bytes_sent());
      EXPECT_EQ(bench.plugin().stats().raw, hops * (static_cast<std::uint64_t>(ranks) - 1) * part * sizeof(float));
      EXPECT_EQ(bench.copied(), 0U);
      return std::vector<float>();
    });
  }
}

/// With error feedback, the mean over many steps of the same values converges; without it, it does not.
TEST_P(CompressedCollectives, ErrorFeedbackCompensatesRounding) {
  constexpr int kSteps = 64;
  const int ranks = GetParam().world.ranks;
  for (const OpKind collective : {OpKind::reduce_scatter, OpKind::all_reduce}) {
    const auto error_of_mean = [&](bool feedback) {
      std::vector<double> worst(static_cast<std::size_t>(ranks));
      run(
          collective,
          [&](Bench& bench) {
            const int rank = bench.channel().rank();
            std::vector<double> sum;
            for (int step = 0; step < kSteps; ++step) {
              const std::vector<float> out = bench.run(values_of(rank, bench.padded()), ReduceOp::avg());
              sum.resize(out.size());
              for (std::size_t i = 0; i < out.size(); ++i) sum[i] += static_cast<double>(out[i]) / kSteps;
            }
            std::vector<double> exact(bench.padded());
            for (int r = 0; r < ranks; ++r) {
              const std::vector<float> values = values_of(r, bench.padded());
              for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += static_cast<double>(values[i]) / ranks;
            }
            const std::size_t first =
                collective == OpKind::all_reduce ? 0 : sum.size() * static_cast<std::size_t>(rank);
            double most = 0;
            for (std::size_t i = 0; i < sum.size(); ++i) most = std::max(most, std::abs(sum[i] - exact[first + i]));
            worst[static_cast<std::size_t>(rank)] = most;
            return std::vector<float>();
          },
          feedback);
      return *std::max_element(worst.begin(), worst.end());
    };
    const double step = GetParam().compression == Compression::int8 ? 5.0 / 127 : 5.0 / 256;  // step of values up to 5
    EXPECT_LT(error_of_mean(true), 2 * step / kSteps);
    EXPECT_GT(error_of_mean(false), 4 * step / kSteps);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, CompressedCollectives,
                         testing::Values(Case{{1}, Compression::int8}, Case{{2}, Compression::int8},
                                         Case{{3}, Compression::int8}, Case{{4}, Compression::int8},
                                         Case{{2, "tcp"}, Compression::int8}, Case{{2, "shm", true}, Compression::int8},
                                         Case{{3, "shm", true}, Compression::bf16}, Case{{2}, Compression::bf16},
                                         Case{{4, "tcp"}, Compression::bf16}),
                         [](const auto& test) {
                           const Case& c = test.param;
                           return std::string(c.compression == Compression::bf16 ? "bf16" : "int8") + "_" +
                                  std::to_string(c.world.ranks) + "_" + c.world.backend + (c.world.lazy ? "_lazy" : "");
                         });

TEST(CompressedCollective, SendsHalfPrecisionUnchangedAsBf16) {
  const CompressionOptions options{OpKind::all_gather, Compression::bf16};
  const auto same = [&](base::DType dtype) {
    return compressed_cost(options, {1024, dtype, 4}).bytes == 768 * base::size_of(dtype);
  };
  EXPECT_TRUE(same(base::DType::bf16));
  EXPECT_TRUE(same(base::DType::f16));
  EXPECT_FALSE(same(base::DType::f32));
  on_ranks(
      {.ranks = 2}, OpKind::all_gather, kShapes, [&] { return std::make_unique<CompressedCollective>(options); },
      [](Bench& bench) {
        const float value = 1 + 0x1p-10F;  // bf16 has no such value
        EXPECT_EQ(static_cast<float>(bench.run(std::vector<base::f16>(8, base::f16(value))).back()), value);
        EXPECT_EQ(bench.run(std::vector<float>(8, value)).back(), 1) << "the control";
        return std::vector<float>();
      });
}

TEST(CompressedCollective, NamesUnsupportedCalls) {
  on_ranks(
      {.ranks = 2}, OpKind::all_reduce, kShapes,
      [] {
        return std::make_unique<CompressedCollective>(CompressionOptions{OpKind::all_reduce, Compression::int8});
      },
      [](Bench& bench) {
        EXPECT_THROW(bench.run(std::vector<float>(16), ReduceOp::max()), base::Unsupported);
        EXPECT_THROW(bench.run(std::vector<float>(15)), base::InvalidUsage);
        EXPECT_EQ(bench.run(std::vector<float>(16, 2.0F)), std::vector<float>(16, 4.0F)) << "it still works";
        // Divided by more ranks than there are, and multiplied before.
        const std::vector<float> twos(16, 2.0F);
        EXPECT_EQ(bench.run(twos, ReduceOp::average_over(8)), std::vector<float>(16, 0.5F));
        EXPECT_EQ(bench.run(twos, ReduceOp::premul_sum(0.5)), std::vector<float>(16, 2.0F));
        return std::vector<float>();
      });
}

}  // namespace
}  // namespace tessera::collectives
