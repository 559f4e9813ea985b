// The library against PyTorch's golden numbers (golden.py), and against directories that transformers wrote
// (directories.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>

#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/safetensors.h"

namespace tessera::nn {
namespace {

const std::string kFolder = TESSERA_PEERS_DIR;

nlohmann::json read_json(const std::string& name) { return nlohmann::json::parse(std::ifstream(kFolder + "/" + name)); }

/// The token generator of models.py.
class Tokens {
 public:
  explicit Tokens(Context& context) : context_(context) {}
  std::pair<Tensor, Tensor> next() {
    constexpr std::int64_t kBatch = 4, kPositions = 33;
    Tensor tokens = Tensor::empty(context_, {kBatch, kPositions}, DType::i32);
    Tensor targets = Tensor::empty(context_, {kBatch, kPositions}, DType::i32);
    for (std::int64_t b = 0; b < kBatch; ++b)
      for (std::int64_t t = 0; t <= kPositions; ++t) {
        state_ = state_ * 1664525U + 1013904223U;
        const auto token = static_cast<std::int32_t>(state_ >> 24U);
        if (t < kPositions) tokens.data<std::int32_t>()[b * kPositions + t] = token;
        if (t > 0) targets.data<std::int32_t>()[b * kPositions + t - 1] = token;
      }
    return {tokens, targets};
  }

 private:
  Context& context_;
  std::uint32_t state_ = 1;
};

/// PyTorch's gradients of the first step, every element.
class GoldenGradients {
 public:
  explicit GoldenGradients(const std::string& model) : file_(kFolder + "/" + model + "-gradients.safetensors") {}
  std::size_t count() const { return file_.entries().size(); }
  std::vector<float> of(const Parameter& parameter) const {
    const SafetensorsEntry* entry = file_.find(parameter.name());
    if (entry == nullptr || entry->shape != parameter.shape())
      throw InvalidUsage(file_.path() + " has no gradient like " + parameter.name());
    std::vector<float> values(static_cast<std::size_t>(parameter.count()));
    file_.read(*entry, {0, parameter.count()}, values.data());
    return values;
  }

 private:
  SafetensorsFile file_;
};

/// Largest difference of an element relative to the bound: 1e-4 of the tensor's largest, plus 1e-7.
double gradient_error(std::span<const float> values, std::span<const float> golden) {
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < golden.size(); ++i) {
    if (!std::isfinite(values[i])) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, std::abs(static_cast<double>(golden[i])));
    worst = std::max(worst, std::abs(static_cast<double>(values[i]) - golden[i]));
  }
  return worst / (1e-4 * largest + 1e-7);
}

std::span<const float> gradient_of(const Parameter& parameter) {
  return {parameter.gradient().value().data<float>(), static_cast<std::size_t>(parameter.count())};
}

class Golden : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Presets, Golden, testing::Values("gpt-nano", "llama-nano"));

/// Largest relative difference of 20 losses; `first` is called with the gradients of the first step.
double loss_error(const nlohmann::json& golden, const OptimizerConfig& config, const char* name,
                  const std::function<void(const CausalModel&)>& first) {
  Context context;
  const auto model = make_model(context, preset(name));
  model->materialize(0);
  Optimizer optimizer(*model, config);
  Tokens tokens(context);
  const std::pair<Tensor, Tensor> batches[] = {tokens.next(), tokens.next()};
  double worst = 0;
  for (std::size_t step = 0; step < golden["losses"].size(); ++step) {
    Tape tape;
    const TapeScope scope(context, &tape);
    const auto& [inputs, targets] = batches[step % 2];
    const Tensor loss = model->loss(inputs, targets);
    tape.backward(loss);
    const double expected = golden["losses"][step].get<double>();
    worst = std::max(worst, std::abs(loss.item() - expected) / expected);
    if (step == 0) first(*model);
    optimizer.step(1e-3);
  }
  return worst;
}

TEST_P(Golden, LossesAndGradientsAreThoseOfPyTorch) {
  const nlohmann::json golden = read_json(std::string(GetParam()) + ".json");
  ASSERT_EQ(golden["losses"].size(), 20U);
  EXPECT_LT(golden["losses"].back().get<double>(), 0.9 * golden["losses"].front().get<double>());  // the loss decreases
  const GoldenGradients gradients(GetParam());
  const auto compare = [&](const CausalModel& model) {
    EXPECT_EQ(gradients.count(), model.parameters().size());
    for (const auto& parameter : model.parameters())
      EXPECT_LE(gradient_error(gradient_of(*parameter), gradients.of(*parameter)), 1.0) << parameter->name();
  };
  EXPECT_LE(loss_error(golden, {}, GetParam(), compare), 1e-4);
}

/// Negative control: other settings of the optimizer are detected.
TEST_P(Golden, DetectsOtherOptimizer) {
  const nlohmann::json golden = read_json(std::string(GetParam()) + ".json");
  EXPECT_GT(loss_error(golden, {.beta2 = 0.99}, GetParam(), [](const CausalModel&) {}), 2e-4);
  EXPECT_GT(loss_error(golden, {.kind = OptimizerConfig::Kind::adam, .weight_decay = 0.1}, GetParam(),
                       [](const CausalModel&) {}),
            2e-4);
}

/// Negative control: a change of one part in a thousand is detected, and so is a change of any single element by two
/// parts in ten thousand of the largest.
TEST_P(Golden, DetectsWrongGradient) {
  const GoldenGradients gradients(GetParam());
  Context context;
  const auto model = make_model(context, preset(GetParam()));
  model->materialize(0);
  Tape tape;
  const TapeScope scope(context, &tape);
  const auto [inputs, targets] = Tokens(context).next();
  tape.backward(model->loss(inputs, targets), 1.001);
  for (const auto& parameter : model->parameters()) {
    const std::vector<float> golden = gradients.of(*parameter);
    EXPECT_GT(gradient_error(gradient_of(*parameter), golden), 1.0) << parameter->name();
    const float largest = std::abs(
        *std::max_element(golden.begin(), golden.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    std::vector<float> values = golden;
    EXPECT_EQ(gradient_error(values, golden), 0.0);
    values[values.size() / 3] += 2e-4F * largest + 2e-7F;
    EXPECT_GT(gradient_error(values, golden), 1.0) << parameter->name();
  }
}

class Folder : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Types, Folder, testing::Values("gpt2", "llama"));

TEST_P(Folder, OfTransformersHasSameLoss) {
  const HfCheckpointReader directory(kFolder + "/transformers-" + GetParam());
  Context context;
  const auto model = make_model(context, directory.config());
  std::vector<SafetensorsTensor> needed;
  for (const auto& parameter : model->parameters()) needed.push_back({parameter->name(), parameter->shape()});
  directory.check(needed);
  model->materialize(0);
  for (const auto& parameter : model->parameters())
    directory.read(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
  context.set_training(false);  // its config has dropout
  const auto [tokens, targets] = Tokens(context).next();
  EXPECT_NEAR(model->loss(tokens, targets).item(), read_json("transformers.json").at(GetParam()).get<double>(), 2e-5);
}

TEST_P(Folder, ConfigOfTransformers5IsEquivalent) {
  const ModelConfig four = read_config(kFolder + "/transformers-" + GetParam() + "/config.json");
  ModelConfig five = read_config(kFolder + "/" + GetParam() + "-config-5.json");
  five.name = four.name;
  five.token_ids = four.token_ids;  // 5 also writes those that are null
  EXPECT_EQ(five, four);
}

}  // namespace
}  // namespace tessera::nn
