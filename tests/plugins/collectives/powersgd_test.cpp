// PowerSGD: matrices as products of thin factors, with the error kept for the next step.
#include "plugins/collectives/powersgd.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "tessera/comm/core/decorator.h"
#include "tests/plugins/collectives/ranks.h"

namespace tessera::collectives {
namespace {

const std::vector<nn::Shape> kShapes = {{24, 40}, {17}, {9, 33}, {2, 2}};

std::size_t offset_of(const Bench& bench, std::size_t entry) {
  return static_cast<std::size_t>(bench.layout().entries[entry].offset);
}

/// u v^T for every matrix, with vectors seeded by these names.
std::vector<float> products(const Bench& bench, const std::string& u, const std::string& v) {
  std::vector<float> all(bench.padded());
  for (std::size_t entry = 0; entry < kShapes.size(); ++entry) {
    const auto rows = static_cast<std::size_t>(kShapes[entry][0]);
    const std::size_t columns = kShapes[entry].size() > 1 ? static_cast<std::size_t>(kShapes[entry][1]) : 1;
    const auto a = normals(u, rows), b = normals(v, columns);
    for (std::size_t i = 0; i < rows * columns; ++i) all[offset_of(bench, entry) + i] = a[i / columns] * b[i % columns];
  }
  return all;
}

/// The largest difference, padding included.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
  return most;
}

Results reduce(const World& world, int rank, const std::function<std::vector<float>(Bench&)>& body,
               bool feedback = true) {
  return on_ranks(
      world, OpKind::all_reduce, kShapes, [&] { return std::make_unique<PowerSgd>("powersgd", rank, feedback); }, body);
}

/// Matrices whose mean has rank 1 are exact, and the same on all ranks.
TEST(PowerSgd, MeanOfItsRankIsExact) {
  for (const World& world : {World{1}, World{2}, World{3}, World{4}, World{2, "tcp"}, World{3, "shm", true}}) {
    std::vector<float> expected;
    const Results results = reduce(world, 2, [&](Bench& bench) {
      std::vector<float> mine = products(bench, "u", "v");
      for (float& value : mine) value *= static_cast<float>(1 + bench.channel().rank());
      if (bench.channel().rank() == 0) {
        expected = products(bench, "u", "v");
        for (float& value : expected) value *= static_cast<float>(1 + bench.channel().size()) / 2;
      }
      return bench.run(mine, ReduceOp::avg());
    });
    for (const auto& result : results) {
      EXPECT_TRUE(same_bits(result, results[0]));
      EXPECT_LT(distance(result, expected), 1e-4);
    }
  }
}

/// Later steps add what one step loses: the mean over steps converges. Without feedback it does not.
TEST(PowerSgd, ErrorFeedbackRecoversLoss) {
  constexpr int kSteps = 80;
  const auto error = [&](bool feedback) {
    double most = 0;
    reduce(
        {.ranks = 2}, 2,
        [&](Bench& bench) {
          const std::vector<float> mine = normals("m" + std::to_string(bench.channel().rank()), bench.padded());
          std::vector<float> mean(bench.padded()), exact(bench.padded());
          for (int step = 0; step < kSteps; ++step) {
            const std::vector<float> out = bench.run(mine, ReduceOp::avg());
            for (std::size_t i = 0; i < out.size(); ++i) mean[i] += out[i] / kSteps;
          }
          const auto first = normals("m0", bench.padded()), second = normals("m1", bench.padded());
          for (std::size_t i = 0; i < exact.size(); ++i) exact[i] = (first[i] + second[i]) / 2;
          const std::size_t count = 24 * 40;  // of the first matrix
          mean.resize(count), exact.resize(count);
          if (bench.channel().rank() == 0) most = distance(mean, exact);
          return std::vector<float>();
        },
        feedback);
    return most;
  };
  EXPECT_LT(error(true), 0.5);
  EXPECT_GT(error(false), 1.5);
}

/// The sum over ranks may be divided by more ranks, as in a mesh: the error is a rank's own share.
TEST(PowerSgd, KeepsFactorOfSum) {
  for (const auto& [op, factor] : {std::pair(ReduceOp::sum(), 1.0F), std::pair(ReduceOp::average_over(8), 8.0F)}) {
    const Results results = reduce({.ranks = 2}, 2, [&](Bench& bench) {
      bench.run(products(bench, "u", "v"), op);
      std::vector<float> lost;
      for (const CollectivePlugin::State& state : bench.plugin().state())
        if (state.name == "unit/error") lost.assign(state.data, state.data + state.count);
      EXPECT_FALSE(lost.empty());
      for (const float each : lost) EXPECT_NEAR(each, 0.0F, 1e-5);
      return bench.run(products(bench, "u", "v"), op);
    });
    for (std::size_t i = 0; i < 24 * 40; ++i)
      ASSERT_NEAR(results[0][i], normals("u", 24)[i / 40] * normals("v", 40)[i % 40] * 2 / factor, 1e-4);
  }
}

/// A gradient that was zero for a while must not prevent later nonzero gradients.
TEST(PowerSgd, RecoversFromZeros) {
  const Results results = reduce({.ranks = 2}, 2, [](Bench& bench) {
    EXPECT_EQ(distance(bench.run(std::vector<float>(bench.padded())), std::vector<float>(bench.padded())), 0.0);
    const std::vector<float> late = bench.run(products(bench, "u", "v"), ReduceOp::avg());
    std::vector<float> out = bench.run(products(bench, "u", "v"), ReduceOp::avg());
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = (out[i] + late[i]) / 2;  // mean of two steps
    EXPECT_LT(distance(out, products(bench, "u", "v")), 1e-3);
    return out;
  });
  EXPECT_TRUE(same_bits(results[0], results[1]));
}

TEST(PowerSgd, TrafficEqualsCost) {
  for (const int ranks : {2, 3, 4})
    reduce({.ranks = ranks}, 4, [&](Bench& bench) {
      const comm::TrafficStats before = bench.channel().traffic();
      bench.run(normals("m", bench.padded()));
      bench.channel().barrier().wait();
      const comm::TrafficStats moved = bench.channel().traffic() - before;
      const fsdp::CollectiveCost cost =
          powersgd_cost(4, {bench.padded(), base::DType::f32, bench.channel().size(), kShapes});
      EXPECT_EQ(moved.bytes_sent(), cost.bytes);
      EXPECT_EQ(moved.calls() - 1, cost.calls);
      EXPECT_EQ(bench.plugin().stats().sent, cost.bytes);
      // P of [24, 40] and [9, 33], and 17 + 4 uncompressed numbers; then Q. Rounded up to 8 for each rank.
      const auto rounded = [&](std::uint64_t count) {
        const auto multiple = static_cast<std::uint64_t>(8 * ranks);
        return (count + multiple - 1) / multiple * multiple;
      };
      const std::uint64_t numbers = rounded(4 * (24 + 9) + 17 + 4) + rounded(4 * (40 + 33));
      EXPECT_EQ(cost.bytes,
                2 * numbers * 4 / static_cast<std::uint64_t>(ranks) * static_cast<std::uint64_t>(ranks - 1));
      EXPECT_EQ(bench.copied(), 2U * (17 + 4) * 4) << "what travels whole is copied in and out";
      return std::vector<float>();
    });
}

/// Counts the numbers given to calls that are infinite or NaN.
class InputCheck final : public comm::Decorator {
 public:
  explicit InputCheck(std::unique_ptr<comm::Communicator> inner) : Decorator(std::move(inner)) {}
  std::size_t not_finite() const { return not_finite_; }

 private:
  void do_after(base::Stream& stream) override { stream.record().wait(); }
  comm::Work do_start(const comm::OpDesc& call) override {
    const std::span numbers(static_cast<const float*>(call.in.data), call.in.count);
    not_finite_ += static_cast<std::size_t>(
        std::count_if(numbers.begin(), numbers.end(), [](float number) { return !std::isfinite(number); }));
    return Decorator::do_start(call);
  }
  std::size_t not_finite_ = 0;
};

/// The padding of a message is zero, though its memory held other numbers: Bench fills released memory with NaN.
TEST(PowerSgd, MessagesHoldNoStaleMemory) {
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(2, config, [](comm::Communicator& world) {
    InputCheck checked(world.split(0, world.rank()));
    Bench bench(checked, {.ranks = 2}, OpKind::all_reduce, kShapes, std::make_unique<PowerSgd>("powersgd", 2, true));
    for (int step = 0; step < 3; ++step) bench.run(products(bench, "u", "v"), ReduceOp::avg());
    EXPECT_EQ(checked.not_finite(), 0U);
    bench.run(std::vector<float>(bench.padded(), NAN), ReduceOp::avg());
    EXPECT_GT(checked.not_finite(), 0U) << "the control";
  });
}

TEST(PowerSgd, ClearedStateRestarts) {
  reduce({.ranks = 2}, 2, [](Bench& bench) {
    const std::vector<float> mine = normals("m" + std::to_string(bench.channel().rank()), bench.padded());
    const std::vector<float> first = bench.run(mine), second = bench.run(mine);
    EXPECT_FALSE(same_bits(first, second)) << "it carries something over";
    bench.plugin().clear_state(bench.context().stream());
    bench.context().stream().synchronize();
    EXPECT_TRUE(same_bits(bench.run(mine), first));
    return first;
  });
}

}  // namespace
}  // namespace tessera::collectives
