// The ZeRO table against the table of the paper.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tessera/base/error.h"
#include "tools/plan/zero_table.h"

namespace tessera::tools {
namespace {

using testing::HasSubstr;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const base::InvalidUsage& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

/// Rajbhandari et al., arXiv 1910.02054, table 1: GB per device, as printed there.
struct PaperRow {
  int devices;
  const char* cells[9];  ///< 7.5B, 128B and 1T parameters; for each Pos, Pos+g and Pos+g+p
};
constexpr PaperRow kPaper[] = {
    {1, {"120", "120", "120", "2048", "2048", "2048", "16000", "16000", "16000"}},
    {4, {"52.5", "41.3", "30", "896", "704", "512", "7000", "5500", "4000"}},
    {16, {"35.6", "21.6", "7.5", "608", "368", "128", "4750", "2875", "1000"}},
    {64, {"31.4", "16.6", "1.88", "536", "284", "32", "4187", "2218", "250"}},
    {256, {"30.4", "15.4", "0.47", "518", "263", "8", "4046", "2054", "62.5"}},
    {1024, {"30.1", "15.1", "0.12", "513", "257", "2", "4011", "2013", "15.6"}},
};
constexpr std::int64_t kPaperModels[] = {7'500'000'000, 128'000'000'000, 1'000'000'000'000};

constexpr fsdp::Precision kBf16{base::DType::bf16, base::DType::bf16};

/// Whether the printed number is the value, rounded or cut off at its last digit: the paper does both.
bool prints_as(double value, const std::string& printed) {
  const std::size_t point = printed.find('.');
  const auto decimals = point == std::string::npos ? 0 : static_cast<int>(printed.size() - point - 1);
  const double digit = std::pow(10.0, -decimals);
  return std::abs(value - std::stod(printed)) < digit * (1 - 1e-9) && value > std::stod(printed) - digit * (0.5 + 1e-9);
}

/// Cells of the paper's table that the engine's formulas give.
int equal_cells(fsdp::Precision precision, const nn::OptimizerConfig& optimizer) {
  int equal = 0;
  for (const PaperRow& row : kPaper)
    for (std::size_t model = 0; model < 3; ++model) {
      const ZeroTable table({.parameters = kPaperModels[model],
                             .ranks = {row.devices},
                             .strategies = {"zero1", "zero2", "fsdp"},
                             .precision = precision,
                             .optimizer = optimizer});
      for (std::size_t stage = 0; stage < 3; ++stage) {
        const double value = static_cast<double>(table.rows().at(stage).total()) / 1e9;
        if (prints_as(value, row.cells[3 * model + stage])) ++equal;
      }
    }
  return equal;
}

TEST(ZeroTable, EqualsPaperInEveryCell) {
  EXPECT_EQ(equal_cells(kBf16, {}), 54);
  const ZeroTable ddp({.parameters = 7'500'000'000, .ranks = {64}, .strategies = {"ddp"}, .precision = kBf16});
  EXPECT_EQ(ddp.rows().at(0).total(), 120'000'000'000u);
}

/// Negative control: other bytes per parameter don't give the paper's cells.
TEST(ZeroTable, OtherPrecisionsAndOptimizersDifferFromPaper) {
  EXPECT_LT(equal_cells({base::DType::bf16, base::DType::f32}, {}), 54 / 2);
  EXPECT_LT(equal_cells({}, {}), 54 / 2);
  EXPECT_LT(equal_cells(kBf16, {.kind = nn::OptimizerConfig::Kind::sgd}), 54 / 2);
  EXPECT_FALSE(prints_as(31.44, "31.3"));
  EXPECT_FALSE(prints_as(4188.0, "4187"));
  EXPECT_FALSE(prints_as(4186.4, "4187"));
}

TEST(ZeroTable, HasRowForEveryStrategyAndColumnForEveryWorld) {
  const ZeroTable table({.parameters = 1000, .ranks = {2, 4}, .precision = kBf16});
  EXPECT_EQ(table.rows().size(), 2 * fsdp::strategy_names().size());
  EXPECT_TRUE(table.left_out().empty());
  const ZeroTable odd({.parameters = 1000, .ranks = {3}});
  EXPECT_EQ(odd.left_out().size(), 1u);
  EXPECT_THAT(odd.text(), HasSubstr("left out: hsdp: 3 ranks"));
}

TEST(ZeroTable, PadsToEqualShardsOnly) {
  const ZeroTable table({.parameters = 10, .ranks = {4}, .strategies = {"ddp", "fsdp", "hsdp"}});
  EXPECT_EQ(table.rows().at(0).total(), 16u * 10);
  EXPECT_EQ(table.rows().at(1).total(), 16u * 3);
  EXPECT_EQ(table.rows().at(2).total(), 16u * 5);
}

TEST(ZeroTable, OptimizerVariantsCount) {
  const auto optimizer_bytes = [](const nn::OptimizerConfig& config, fsdp::Precision precision) {
    return ZeroTable(
               {.parameters = 1000, .ranks = {1}, .strategies = {"ddp"}, .precision = precision, .optimizer = config})
        .rows()
        .at(0)
        .state.optimizer;
  };
  using Kind = nn::OptimizerConfig::Kind;
  EXPECT_EQ(optimizer_bytes({.kind = Kind::sgd}, {}), 0u);
  EXPECT_EQ(optimizer_bytes({.kind = Kind::sgd, .momentum = 0.9}, {}), 4000u);
  EXPECT_EQ(optimizer_bytes({}, {}), 8000u);
  EXPECT_EQ(optimizer_bytes({.amsgrad = true}, {}), 12000u);
  EXPECT_EQ(optimizer_bytes({.amsgrad = true}, kBf16), 16000u);
  const auto named = [](const nn::OptimizerConfig& config) {
    return ZeroTable({.parameters = 1000, .ranks = {1}, .optimizer = config}).text();
  };
  EXPECT_THAT(named({.kind = Kind::sgd, .momentum = 0.9}), HasSubstr(", sgd with momentum, 1 rank:"));
  EXPECT_THAT(named({.kind = Kind::adam, .amsgrad = true}), HasSubstr(", adam with amsgrad, 1 rank:"));
  EXPECT_THAT(named({}), HasSubstr(", adamw, 1 rank:"));
}

TEST(ZeroTable, RefusesWhatCannotRun) {
  const auto with = [](ZeroTableSpec spec) { return error_of([&] { const ZeroTable table(std::move(spec)); }); };
  EXPECT_THAT(with({.parameters = 10, .ranks = {3}, .strategies = {"hsdp"}}), HasSubstr("3 ranks don't divide"));
  EXPECT_THAT(with({.parameters = 10, .ranks = {6}, .mesh = "2x2"}), HasSubstr("--mesh 2x2 has 4 positions for 6"));
  EXPECT_THAT(with({.parameters = 10, .ranks = {1}, .mesh = "65536x65536"}), HasSubstr("has 4294967296 positions"));
  EXPECT_THAT(with({.parameters = 10, .ranks = {4}, .strategies = {"nope"}}), HasSubstr("'nope'"));
  EXPECT_THAT(with({.parameters = 10, .ranks = {4}, .strategies = {"fsdp", "full_shard"}}), HasSubstr("twice"));
  EXPECT_THAT(with({.parameters = 10,
                    .ranks = {4},
                    .strategies = {"diloco"},
                    .precision = {base::DType::f16, base::DType::f16}}),
              HasSubstr("--precision f16"));
  EXPECT_EQ(with({.parameters = 10, .ranks = {4}, .mesh = "2x2"}), "");
}

TEST(ZeroTable, MeshOfHostsAndMemoryComeFromCluster) {
  ZeroTableSpec spec{.parameters = 7'500'000'000,
                     .ranks = {64},
                     .strategies = {"ddp", "hsdp"},
                     .ranks_per_host = 8,
                     .memory_bytes = 80e9,
                     .precision = kBf16};
  const ZeroTable table(spec);
  EXPECT_EQ(table.rows().at(1).mesh.size_of(fsdp::kShardAxis), 8);
  EXPECT_EQ(table.rows().at(1).total(), 15'000'000'000u);
  EXPECT_THAT(table.text(), HasSubstr("120*\n"));
  EXPECT_THAT(table.text(), testing::Not(HasSubstr("15.0*")));
}

}  // namespace
}  // namespace tessera::tools
