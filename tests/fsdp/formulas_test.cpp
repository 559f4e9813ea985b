// The general formulas against the table in the documentation, line by line.
#include <gtest/gtest.h>

#include "tessera/fsdp/formulas.h"

namespace tessera::fsdp {
namespace {

const std::vector<UnitSize> kUnits = {
    {960, true, true}, {1920, false, false}, {2880, false, false}, {480, true, false}};
constexpr std::uint64_t kPsi = 960 + 1920 + 2880 + 480;
constexpr std::uint64_t kKept = 960 + 480;
constexpr std::uint64_t kBytes = 4;

std::vector<UnitSize> all_kept() {
  std::vector<UnitSize> units = kUnits;
  for (UnitSize& unit : units) unit.kept_after_forward = true;
  return units;
}

TEST(Formulas, Ddp) {
  for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
    const auto f =
        communication_formula(strategy_named("ddp"), MeshShape::grid(1, static_cast<int>(n)), all_kept());
    EXPECT_EQ(f.calls, (TrafficVolume{0, 0, 4}));
    EXPECT_EQ(f.bytes, (TrafficVolume{0, 0, 2 * (n - 1) * kBytes * kPsi / n}));
  }
}

TEST(Formulas, ZeroOneAndTwo) {
  for (const char* name : {"zero1", "zero2"}) {
    for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
      const auto f =
          communication_formula(strategy_named(name), MeshShape::grid(1, static_cast<int>(n)), all_kept());
      const std::uint64_t once = (n - 1) * kBytes * kPsi / n;
      EXPECT_EQ(f.calls, (TrafficVolume{4, 4, 0}));
      EXPECT_EQ(f.bytes, (TrafficVolume{once, once, 0}));
    }
  }
}

TEST(Formulas, Fsdp) {
  for (const std::uint64_t n : {2u, 3u, 4u, 5u}) {
    const auto f =
        communication_formula(strategy_named("fsdp"), MeshShape::grid(1, static_cast<int>(n)), kUnits);
    EXPECT_EQ(f.calls, (TrafficVolume{2 * 4 - 2, 4, 0}));
    EXPECT_EQ(f.bytes, (TrafficVolume{(n - 1) * kBytes * (2 * kPsi - kKept) / n, (n - 1) * kBytes * kPsi / n, 0}));
  }
}

TEST(Formulas, ShardGradOpGathersEachUnitOnce) {
  const auto f = communication_formula(strategy_named("shard_grad_op"), MeshShape::grid(1, 4), all_kept());
  EXPECT_EQ(f.calls, (TrafficVolume{4, 4, 0}));
  EXPECT_EQ(f.bytes, (TrafficVolume{3 * kBytes * kPsi / 4, 3 * kBytes * kPsi / 4, 0}));
}

TEST(Formulas, Hsdp) {
  const std::uint64_t r = 2;
  const std::uint64_t s = 3;
  const auto f = communication_formula(strategy_named("hsdp"), MeshShape::grid(2, 3), kUnits);
  EXPECT_EQ(f.calls, (TrafficVolume{2 * 4 - 2, 4, 4}));
  EXPECT_EQ(f.bytes, (TrafficVolume{(s - 1) * kBytes * (2 * kPsi - kKept) / s, (s - 1) * kBytes * kPsi / s,
                             2 * (r - 1) * kBytes * kPsi / r / s}));
}

TEST(Formulas, OneRankAndAxesOfLengthOneCallNothing) {
  for (const std::string& name : strategy_names()) {
    const auto f = communication_formula(strategy_named(name), MeshShape::grid(1, 1), kUnits);
    EXPECT_EQ(f.calls, TrafficVolume{}) << name;
    EXPECT_EQ(f.bytes, TrafficVolume{}) << name;
  }
  const auto f = communication_formula(strategy_named("hsdp"), MeshShape::grid(1, 4), kUnits);
  EXPECT_EQ(f.calls, communication_formula(strategy_named("fsdp"), MeshShape::grid(1, 4), kUnits).calls);
}

/// The ZeRO table for f32 and AdamW: 16P, 8P + 8P/n, 4P + 12P/n, 16P/n.
TEST(Formulas, ModelState) {
  const auto total = [](const char* name, const MeshShape& mesh) {
    const ModelStateBytes bytes = model_state_formula(strategy_named(name), mesh, kPsi, 2);
    return bytes.parameter + bytes.gradient + bytes.optimizer;
  };
  for (const std::uint64_t n : {1u, 2u, 3u, 4u, 5u}) {
    const MeshShape mesh = MeshShape::grid(1, static_cast<int>(n));
    EXPECT_EQ(total("ddp", mesh), 16 * kPsi);
    EXPECT_EQ(total("zero1", mesh), 8 * kPsi + 8 * kPsi / n);
    EXPECT_EQ(total("zero2", mesh), 4 * kPsi + 12 * kPsi / n);
    EXPECT_EQ(total("fsdp", mesh), 16 * kPsi / n);
    EXPECT_EQ(total("shard_grad_op", mesh), 16 * kPsi / n);
  }
  EXPECT_EQ(total("hsdp", MeshShape::grid(2, 3)), 16 * kPsi / 3);
}

TEST(Formulas, Peaks) {
  const MeshShape mesh = MeshShape::grid(1, 4);
  const PeakBounds fsdp = peak_formula(strategy_named("fsdp"), mesh, kUnits, {});
  EXPECT_EQ(fsdp.unsharded_parameter, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(fsdp.unsharded_gradient, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("fsdp"), mesh, kUnits, {.prefetch = 0}).unsharded_parameter, 4u * (960 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("ddp"), mesh, kUnits, {}).unsharded_parameter, 0u);
  EXPECT_EQ(peak_formula(strategy_named("zero2"), mesh, kUnits, {}).unsharded_parameter, 0u);
  EXPECT_EQ(peak_formula(strategy_named("zero2"), mesh, kUnits, {}).unsharded_gradient, 4u * (960 + 1920 + 2880));
  EXPECT_EQ(peak_formula(strategy_named("shard_grad_op"), mesh, all_kept(), {}).unsharded_parameter, 4 * kPsi);
}

}  // namespace
}  // namespace tessera::fsdp
