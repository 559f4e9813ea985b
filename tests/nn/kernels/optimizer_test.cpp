#include "tessera/nn/kernels/optimizer.h"

#include "tessera/base/error.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

constexpr std::size_t kCount = 133;
constexpr std::uint64_t kSteps = 12;

template <class T>
std::vector<T> gradient_of(std::uint64_t step) {
  return random_vector<T>(kCount, 100 + step,
                          1.0 / static_cast<double>(step * step));  // decreases: amsgrad has an effect
}

/// PyTorch's documented algorithms, in double, one element at a time.
template <class T>
std::vector<double> adam_reference(const AdamStep<T>& o) {
  std::vector<double> p = random_vector<double>(kCount, 1), m(kCount), v(kCount), top(kCount);
  for (std::uint64_t t = 1; t <= kSteps; ++t) {
    const auto gradient = gradient_of<double>(t);
    for (std::size_t i = 0; i < kCount; ++i) {
      double g = gradient[i] * o.grad_scale;
      if (o.maximize) g = -g;
      if (o.decoupled)
        p[i] -= o.learning_rate * o.weight_decay * p[i];
      else
        g += o.weight_decay * p[i];
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      top[i] = std::max(top[i], v[i]);
      const double second = o.max_second_moment ? top[i] : v[i];
      const double m_hat = m[i] / (1 - std::pow(o.beta1, t)), v_hat = second / (1 - std::pow(o.beta2, t));
      p[i] -= o.learning_rate * m_hat / (std::sqrt(v_hat) + o.eps);
    }
  }
  return p;
}

template <class T>
std::vector<T> adam_run(AdamStep<T> o, const std::vector<std::size_t>& bounds, std::size_t threads) {
  ThreadPool pool(threads);
  std::vector<T> p = random_vector<T>(kCount, 1), m(kCount), v(kCount), top(kCount);
  const bool amsgrad = o.max_second_moment != nullptr;
  for (o.step = 1; o.step <= kSteps; ++o.step) {
    const std::vector<T> g = gradient_of<T>(o.step);
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      const std::size_t at = bounds[i];
      o.parameter = p.data() + at;
      o.gradient = g.data() + at;
      o.first_moment = m.data() + at;
      o.second_moment = v.data() + at;
      o.max_second_moment = amsgrad ? top.data() + at : nullptr;
      o.count = bounds[i + 1] - at;
      adam_step(pool, o);
    }
  }
  return p;
}

const std::vector<std::size_t> kWhole = {0, kCount}, kParts = {0, 1, 9, 31, 64, 65, 132, kCount};

template <class T>
std::vector<AdamStep<T>> adam_settings() {
  static T amsgrad_wanted;  // any address: the runs use their own buffer
  AdamStep<T> plain{.learning_rate = 1e-2, .weight_decay = 0.1};
  std::vector<AdamStep<T>> all(6, plain);
  all[1].decoupled = false;
  all[2].beta2 = 0.8, all[2].max_second_moment = &amsgrad_wanted;
  all[3].maximize = true;
  all[4].grad_scale = 0.25, all[4].eps = 1e-2;  // Adam hides a factor, except with a large eps
  all[5].beta1 = 0.8, all[5].beta2 = 0.95, all[5].eps = 1e-3, all[5].decoupled = false,
  all[5].max_second_moment = &amsgrad_wanted;
  return all;
}

TEST(Adam, EqualsReference) {
  const auto in_double = adam_settings<double>();
  const auto in_float = adam_settings<float>();
  for (std::size_t i = 0; i < in_double.size(); ++i) {
    const auto expected = adam_reference(in_double[i]);
    EXPECT_LT(relative_difference(adam_run(in_double[i], kWhole, 1), expected), 1e-13) << i;
    EXPECT_LT(relative_difference(adam_run(in_float[i], kWhole, 1), expected), 2e-6) << i;
    // Control: results of the settings differ, so a reference with another setting would be detected.
    if (i > 0) {
      EXPECT_GT(relative_difference(adam_reference(in_double[0]), expected), 1e-4) << i;
    }
  }
}

TEST(Adam, ShardBoundariesChangeNoBit) {
  for (const auto& setting : adam_settings<float>()) {
    const auto whole = adam_run(setting, kWhole, 1);
    EXPECT_TRUE(same_bits(adam_run(setting, kParts, 1), whole));
    EXPECT_TRUE(same_bits(adam_run(setting, kParts, 3), whole));
  }
  ThreadPool pool;
  EXPECT_THROW(adam_step<float>(pool, {.step = 0}), base::InvalidUsage);
}

template <class T>
std::vector<double> sgd_reference(const SgdStep<T>& o) {
  std::vector<double> p = random_vector<double>(kCount, 1), buffer(kCount);
  for (std::uint64_t t = 1; t <= kSteps; ++t) {
    const auto gradient = gradient_of<double>(t);
    for (std::size_t i = 0; i < kCount; ++i) {
      double g = gradient[i] * o.grad_scale * (o.maximize ? -1 : 1) + o.weight_decay * p[i];
      if (o.momentum != 0) {
        buffer[i] = t == 1 ? g : o.momentum * buffer[i] + g;
        g = o.nesterov ? g + o.momentum * buffer[i] : buffer[i];
      }
      p[i] -= o.learning_rate * g;
    }
  }
  return p;
}

template <class T>
std::vector<T> sgd_run(SgdStep<T> o, const std::vector<std::size_t>& bounds, std::size_t threads) {
  ThreadPool pool(threads);
  std::vector<T> p = random_vector<T>(kCount, 1), buffer(kCount, T(NAN));
  for (std::uint64_t t = 1; t <= kSteps; ++t) {
    const std::vector<T> g = gradient_of<T>(t);
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      o.parameter = p.data() + bounds[i];
      o.gradient = g.data() + bounds[i];
      o.momentum_buffer = o.momentum != 0 ? buffer.data() + bounds[i] : nullptr;
      o.count = bounds[i + 1] - bounds[i];
      o.first_step = t == 1;
      sgd_step(pool, o);
    }
  }
  return p;
}

template <class T>
std::vector<SgdStep<T>> sgd_settings() {
  std::vector<SgdStep<T>> all(6, SgdStep<T>{.learning_rate = 0.05});
  all[1].momentum = 0.9;
  all[2].momentum = 0.9, all[2].nesterov = true;
  all[3].weight_decay = 0.1;
  all[4].maximize = true;
  all[5].momentum = 0.5, all[5].nesterov = true, all[5].weight_decay = 0.2, all[5].maximize = true,
  all[5].grad_scale = 0.5;
  return all;
}

TEST(Sgd, EqualsReferenceForAnySlices) {
  const auto in_double = sgd_settings<double>();
  const auto in_float = sgd_settings<float>();
  for (std::size_t i = 0; i < in_double.size(); ++i) {
    const auto expected = sgd_reference(in_double[i]);
    EXPECT_LT(relative_difference(sgd_run(in_double[i], kWhole, 1), expected), 1e-13) << i;
    const auto whole = sgd_run(in_float[i], kWhole, 1);
    EXPECT_LT(relative_difference(whole, expected), 2e-6) << i;
    EXPECT_TRUE(same_bits(sgd_run(in_float[i], kParts, 2), whole));
    if (i > 0) {
      EXPECT_GT(relative_difference(sgd_reference(in_double[0]), expected), 1e-4) << i;
    }
  }
  ThreadPool pool;
  float p = 0;
  EXPECT_THROW(sgd_step<float>(pool, {.parameter = &p, .gradient = &p, .count = 1, .momentum = 0.9}),
               base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::kernels
