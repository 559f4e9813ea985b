// Optimizers against a reference in double, options, and schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tessera/nn/lr_schedule.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/random.h"

namespace tessera::nn {
namespace {

using Kind = OptimizerConfig::Kind;

/// One element, as PyTorch's documentation defines it.
struct Reference {
  OptimizerConfig config;
  double value = 0, first = 0, second = 0, largest = 0;
  int steps = 0;
  void step(double gradient, double rate, bool decay) {
    ++steps;
    const double lambda = decay ? config.decay() : 0.0;
    double g = config.maximize ? -gradient : gradient;
    if (config.kind == Kind::adamw) {
      value -= rate * lambda * value;
    } else {
      g += lambda * value;
    }
    if (config.kind == Kind::sgd) {
      if (config.momentum != 0) {
        first = steps == 1 ? g : config.momentum * first + g;
        g = config.nesterov ? g + config.momentum * first : first;
      }
      value -= rate * g;
      return;
    }
    first = config.beta1 * first + (1 - config.beta1) * g;
    second = config.beta2 * second + (1 - config.beta2) * g * g;
    largest = std::max(largest, second);
    const double v = config.amsgrad ? largest : second;
    const double correction = std::sqrt(v / (1 - std::pow(config.beta2, steps)));
    value -= rate * (first / (1 - std::pow(config.beta1, steps))) / (correction + config.eps);
  }
};

std::vector<OptimizerConfig> configs() {
  std::vector<OptimizerConfig> all;
  for (const Kind kind : {Kind::adamw, Kind::adam})
    for (const bool amsgrad : {false, true})
      all.push_back({.kind = kind, .weight_decay = 0.1, .amsgrad = amsgrad, .maximize = amsgrad});
  all.push_back({.kind = Kind::sgd, .weight_decay = 0.1});
  all.push_back({.kind = Kind::sgd, .weight_decay = 0.1, .momentum = 0.9});
  all.push_back({.kind = Kind::sgd, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true, .maximize = true});
  return all;
}

class Updates : public testing::TestWithParam<OptimizerConfig> {};
INSTANTIATE_TEST_SUITE_P(All, Updates, testing::ValuesIn(configs()));

constexpr std::size_t kCount = 37;

std::vector<float> run(Context& context, const OptimizerConfig& config, const std::vector<std::size_t>& bounds,
                       bool decay) {
  std::vector<float> values(kCount), gradients(kCount);
  std::array<std::vector<float>, kMaxStateSlots> state;
  // SGD's first step sets its buffer, whatever that held.
  const float before = config.kind == Kind::sgd ? std::numeric_limits<float>::quiet_NaN() : 0.0F;
  for (auto& slot : state) slot.assign(kCount, before);
  fill_normal({"values", 1, 0, kCount}, 0.0F, 1.0F, values.data());
  for (std::uint64_t step = 1; step <= 6; ++step) {
    fill_normal({"gradients", step, 0, kCount}, 0.0F, 1.0F, gradients.data());
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      OptimizerRange range{values.data() + bounds[i],
                           gradients.data() + bounds[i],
                           {},
                           static_cast<std::int64_t>(bounds[i + 1] - bounds[i]),
                           decay};
      for (int slot = 0; slot < state_slots(config); ++slot)
        range.state[static_cast<std::size_t>(slot)] = state[static_cast<std::size_t>(slot)].data() + bounds[i];
      update(context, config, {.number = step, .learning_rate = 0.01}, range);
    }
    context.stream().synchronize();
  }
  return values;
}

TEST_P(Updates, EqualReferenceInDouble) {
  Context context;
  for (const bool decay : {true, false}) {
    const std::vector<float> values = run(context, GetParam(), {0, kCount}, decay);
    std::vector<float> start(kCount), gradients(kCount);
    fill_normal({"values", 1, 0, kCount}, 0.0F, 1.0F, start.data());
    double without_decay = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      Reference reference{GetParam(), start[i]}, other{GetParam(), start[i]};
      for (std::uint64_t step = 1; step <= 6; ++step) {
        fill_normal({"gradients", step, 0, kCount}, 0.0F, 1.0F, gradients.data());
        reference.step(gradients[i], 0.01, decay);
        other.step(gradients[i], 0.01, !decay);
      }
      EXPECT_NEAR(values[i], reference.value, 2e-6);
      without_decay = std::max(without_decay, std::abs(values[i] - other.value));
    }
    EXPECT_GT(without_decay, 2e-5);  // decay has an effect
  }
}

TEST_P(Updates, SupportAnyRangeOnLazyStreams) {
  Context context, late({.threads = 2, .make_stream = make_lazy_stream});
  const std::vector<float> whole = run(context, GetParam(), {0, kCount}, true);
  EXPECT_EQ(run(context, GetParam(), {0, 1, 8, 21, kCount}, true), whole);
  EXPECT_EQ(run(late, GetParam(), {0, kCount}, true), whole);
}

TEST(Optimizers, ReadGradientScaleInStreamOrder) {
  Context context({.make_stream = make_lazy_stream});
  float value = 1.0F, gradient = 2.0F;
  double factor = 1.0;
  update(context, {.kind = Kind::sgd, .weight_decay = 0},
         {.number = 1, .learning_rate = 0.5, .gradient_scale = &factor}, {&value, &gradient, {}, 1, true});
  factor = 0.25;
  context.stream().synchronize();
  EXPECT_EQ(value, 0.75F);
}

TEST(Optimizers, KeepUnusedParameters) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  model->materialize(0);
  const auto values = [&] {
    context.stream().synchronize();
    std::vector<float> all;
    for (const auto& parameter : model->parameters()) {
      const float* const data = parameter->tensor().data<float>();
      all.insert(all.end(), data, data + parameter->count());
    }
    return all;
  };
  const std::vector<float> before = values();
  Optimizer optimizer(*model, {.weight_decay = 0.5});
  optimizer.step(0.1);
  EXPECT_EQ(values(), before);
  // The control: with gradients, even zero ones, they decay.
  for (const auto& parameter : model->parameters()) {
    GradientTarget target = parameter->gradient().write();
    std::fill_n(target.tensor.data<float>(), parameter->count(), 0.0F);
  }
  optimizer.step(0.1);
  EXPECT_NE(values(), before);
}

TEST(Optimizers, RejectInvalidOptions) {
  EXPECT_NO_THROW(validate(OptimizerConfig{}));
  const std::vector<OptimizerConfig> wrong{{.beta1 = 1.0},
                                           {.beta2 = -0.1},
                                           {.eps = -1},
                                           {.weight_decay = -1},
                                           {.momentum = 0.9},
                                           {.nesterov = true},
                                           {.kind = Kind::sgd, .nesterov = true},
                                           {.kind = Kind::sgd, .amsgrad = true},
                                           {.beta1 = std::nan("")}};
  for (const OptimizerConfig& config : wrong) EXPECT_THROW(validate(config), InvalidUsage);
  EXPECT_THROW(parse_optimizer("lion"), InvalidUsage);
}

TEST(LrSchedules, EqualFormula) {
  const LrSchedule constant{.peak = 0.5, .warmup = 4};
  EXPECT_DOUBLE_EQ(learning_rate(constant, 1), 0.125);
  EXPECT_DOUBLE_EQ(learning_rate(constant, 4), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(constant, 100), 0.5);
  const LrSchedule cosine{.kind = LrSchedule::Kind::cosine, .peak = 1.0, .floor = 0.1, .warmup = 2, .steps = 12};
  EXPECT_DOUBLE_EQ(learning_rate(cosine, 2), 1.0);
  EXPECT_NEAR(learning_rate(cosine, 7), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(cosine, 12), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(cosine, 20), 0.1, 1e-12);
  EXPECT_THROW(parse_schedule("linear"), InvalidUsage);
  EXPECT_THROW(validate(LrSchedule{.peak = -1.0}), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn
