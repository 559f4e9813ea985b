// plan --validate: costs by shape, steps that are timed again, and the fit.
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tools/plan/calibration.h"
#include "tools/plan/validation.h"

namespace tessera::tools {
namespace {

constexpr double kExact = 1e-8;

double product(const char* device, ProductSize size) { return product_time(device_profile(device), size).seconds; }

TEST(DeviceProfile, ProductOfOneTile) {
  // One 64 x 64 tile of 64 steps, with a start worth 150 more: on one of 108 multiprocessors, at 0.62 of its rate.
  const double rate = 271.2e12 / 0.97 / 108 * 0.62;
  EXPECT_NEAR(product("A100-40GB", {64, 64, 64, 1}), 64 * 64 * 2 * (64 + 150) / rate, 1e-15);
}

TEST(DeviceProfile, ProductsOfSeveralShapes) {
  EXPECT_NEAR(product("A100-80GB", {4096, 4096, 4096, 1}) / 0.0005304802, 1, kExact);
  EXPECT_NEAR(product("H100-80GB", {8192, 11008, 4096, 1}) / 0.000968822543, 1, kExact);
  EXPECT_NEAR(product("A100-80GB", {1024, 768, 768, 1}) / 7.26237112e-06, 1, kExact);
  EXPECT_NEAR(product("A100-80GB", {768, 768, 16384, 1}) / 8.46401352e-05, 1, kExact) << "split along K";
  EXPECT_FALSE(product_time(device_profile("A100-80GB"), {4096, 4096, 4096, 1}).memory);
}

TEST(DeviceProfile, FlatProductTakesTheTimeOfItsBytes) {
  const ProductTime time = product_time(device_profile("H100-80GB"), {2048, 128, 2048, 32});
  EXPECT_TRUE(time.memory);
  EXPECT_NEAR(time.seconds / 0.000116659834, 1, kExact);
}

TEST(DeviceProfile, FusedAttention) {
  const auto seconds = [](const char* device, AttentionKernel kernel, AttentionSize size, bool backward) {
    return fused_attention_time(device_profile(device), kernel, size, backward);
  };
  const AttentionSize size{128, 2048, 128};
  EXPECT_NEAR(seconds("A100-80GB", AttentionKernel::triton, size, false) / 0.00123990043, 1, kExact);
  EXPECT_NEAR(seconds("A100-80GB", AttentionKernel::triton, size, true) / 0.00485320048, 1, kExact);
  EXPECT_NEAR(seconds("H100-80GB", AttentionKernel::flash1, {16, 512, 80}, false) / 8.45623223e-06, 1, kExact);
  EXPECT_NEAR(seconds("H100-80GB", AttentionKernel::flash2, {64, 8192, 128}, true) / 0.010286607, 1, kExact);
}

TEST(DeviceProfile, UnknownNamesHaveTheirGeneration) {
  EXPECT_EQ(device_profile("H200 NVL").name, "H200-SXM");
  EXPECT_EQ(device_profile("H100-SXM5").name, "H100");
  EXPECT_EQ(device_profile("unknown").name, "A100");
}

/// A row of a small model; `fields` replace its own.
PublishedRow row_of(const nlohmann::json& fields) {
  nlohmann::json row = {{"id", "r"},
                        {"source", {{"id", "s"}}},
                        {"model", {{"layers", 4}, {"hidden", 1024}, {"heads", 16}, {"vocab", 50257}, {"tied", true}}},
                        {"cluster", {{"id", "c"}, {"gpu", "A100-80GB"}, {"inter_Gbps_per_node", 400}}},
                        {"seq", 1024},
                        {"micro_batch", 4},
                        {"accum", 1},
                        {"n_gpus", 8},
                        {"strategy", "FSDP"},
                        {"step_time_s", 0.1}};
  row.update(fields);
  return parse_published_rows(nlohmann::json::array({row}).dump(), "rows.json").at(0);
}

double seconds_of(const nlohmann::json& fields, const MachineParameters& parameters = {}) {
  return RecordedStep(workload_of(row_of(fields))).seconds(parameters);
}

TEST(RecordedStep, MicrobatchesThatAreNotRecordedExtendTheStep) {
  for (const char* strategy : {"FSDP", "DDP", "ZeRO-1", "shard-grad-op", "HSDP"}) {
    const auto with = [&](int accum) { return seconds_of({{"strategy", strategy}, {"accum", accum}, {"n_gpus", 16}}); };
    const double one = with(4) - with(3);
    EXPECT_GT(one, 0) << strategy;
    EXPECT_NEAR(with(40), with(4) + 36 * one, 1e-9) << strategy;
  }
}

TEST(RecordedStep, EachParameterMattersWhereItShould) {
  const RecordedStep step(workload_of(row_of({{"n_gpus", 64}, {"accum", 2}})));
  const double base = step.seconds({});
  EXPECT_GT(step.seconds({.products = 0.4}), base);
  EXPECT_GT(step.seconds({.memory = 0.6}), base);
  EXPECT_GT(step.seconds({.launch_s = 1e-3}), base);
  EXPECT_GT(step.seconds({.link = 0.1}), 2 * base) << "bound by communication";
  EXPECT_NEAR(step.seconds({.overhead = 2}), base + 20e-3, 1e-9);
  EXPECT_EQ(step.seconds({}), base) << "a step can be timed again";
}

TEST(RecordedStep, RecomputationCostsWhatItRecomputes) {
  const nlohmann::json one = {{"n_gpus", 1}, {"micro_batch", 16}};
  const auto with = [&](const char* text) {
    nlohmann::json fields = one;
    fields["act_ckpt"] = text;
    return seconds_of(fields);
  };
  const double none = with("none"), half = with("full on 2 of 4"), all = with("full"), some = with("selective per op");
  EXPECT_GT(half, none);
  EXPECT_NEAR(all - none, 2 * (half - none), 1e-6);
  EXPECT_EQ(with("full on 0 of 4"), none);
  EXPECT_GT(some, none);
  EXPECT_LT(some, all);
}

TEST(RecordedStep, CollectivesSlowDownTheKernelsBesideThem) {
  const nlohmann::json model = {{"layers", 17}, {"hidden", 1024}, {"heads", 16}, {"vocab", 1024}, {"tied", true}};
  nlohmann::json fields = {{"n_gpus", 1}, {"micro_batch", 32}, {"strategy", "DDP"}, {"model", model}};
  const double alone = seconds_of(fields);
  fields["n_gpus"] = 2;
  const RecordedStep step(workload_of(row_of(fields)));
  const double beside = step.seconds({}) - alone;
  fields["overlap"] = "none";
  const double after = seconds_of(fields) - alone;
  // Two ranks reach 85 % of the rate. The gradients of the embedding and of the first block are reduced at the end in
  // any case. While those of the 16 others are, 16 of 108 multiprocessors are busy.
  const double rate = 227e9 * 0.85, block = 2 * step.workload().block_parameters / rate,
               embedding = 2 * step.workload().root_parameters / rate;
  EXPECT_NEAR(after / (17 * block + embedding), 1, 0.05);
  EXPECT_NEAR((beside - embedding - block) / (16 * block * 16 / 108), 1, 0.3);
}

TEST(Calibration, FindsTheParametersOfStepsThatTheModelMade) {
  const nlohmann::json model = {{"layers", 4}, {"hidden", 4096}, {"heads", 32}, {"vocab", 50257}};
  std::vector<RecordedStep> steps;
  for (const int batch : {4, 8, 16})
    steps.emplace_back(workload_of(row_of({{"micro_batch", batch}, {"model", model}, {"accum", 8}})));
  MachineParameters truth = prior_of(steps[0].workload());
  truth.products *= 0.9;
  const MachineParameters prior = prior_of(steps[0].workload());
  std::vector<MeasuredStep> measured;
  for (const RecordedStep& step : steps) measured.push_back({&step, step.seconds(truth)});
  const Calibration found = calibrate(steps[0].workload(), measured);
  EXPECT_EQ(found.fitted.size(), 3U);
  EXPECT_NEAR(found.parameters.products / truth.products, 1, 0.05);
  const MeasuredStep& largest = measured.back();
  EXPECT_NEAR(largest.step->seconds(found.parameters) / largest.seconds, 1, 0.02);
  EXPECT_LT(largest.step->seconds(prior) / largest.seconds, 0.95) << "control: the prior is not the answer";
  EXPECT_EQ(calibrate(steps[0].workload(), {}).fitted.size(), 0U);
  EXPECT_EQ(calibrate(steps[0].workload(), {measured[0]}).fitted.size(), 2U);
}

TEST(Validation, OutliersAndCalibratingRowsAreInNoFigure) {
  nlohmann::json list = nlohmann::json::array();
  for (const char* id : {"cal", "good", "odd"})
    list.push_back({{"id", id},
                    {"source", {{"id", "s"}}},
                    {"model", {{"layers", 2}, {"hidden", 512}, {"heads", 8}, {"vocab", 1024}}},
                    {"strategy", "FSDP"},
                    {"tokens_per_s_per_gpu", 1e5}});
  list[0]["role"] = "calibrate";
  list[2]["outlier"] = "marked";
  const Validation validation = validate_rows(parse_published_rows(list.dump(), "rows.json"));
  ASSERT_EQ(validation.rows.size(), 3U);
  const ErrorSummary errors = errors_of(validation, "s", "yes");
  EXPECT_EQ(errors.rows, 1U);
  EXPECT_EQ(errors.mean, validation.rows[1].error());
  EXPECT_NEAR(validation.rows[1].predicted / 1e5 * (1 + validation.rows[1].step_error), 1, 1e-9);
}

}  // namespace
}  // namespace tessera::tools
