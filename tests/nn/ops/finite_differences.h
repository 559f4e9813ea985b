// Compares the gradient of an operation through the tape with central differences in double.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "tessera/nn/random.h"
#include "tessera/nn/tape.h"

namespace tessera::nn::test {

/// A leaf of normally distributed numbers that requires a gradient.
inline Tensor leaf(Context& context, Shape shape, std::string_view name, DType dtype = DType::f64) {
  Tensor tensor = Tensor::empty(context, std::move(shape), dtype);
  const auto count = static_cast<std::uint64_t>(tensor.count());
  if (dtype == DType::f64) {
    fill_normal({name, 7, 0, count}, 0.0, 1.0, tensor.data<double>());
  } else {
    fill_normal({name, 7, 0, count}, 0.0F, 1.0F, tensor.data<float>());
  }
  tensor.set_requires_grad(true);
  return tensor;
}

inline Tensor ids(Context& context, const Shape& shape, const std::vector<std::int32_t>& values) {
  Tensor tensor = Tensor::empty(context, shape, DType::i32);
  std::copy(values.begin(), values.end(), tensor.data<std::int32_t>());
  return tensor;
}

/// sum of x * (fixed normal weights): a scalar of any tensor, with a gradient that differs in every element.
inline Tensor weighted_sum(const Tensor& x) {
  Context& context = x.context();
  Tensor loss = Tensor::empty(context, {}, DType::f64);
  std::vector<double> weights(static_cast<std::size_t>(x.count()));
  fill_normal({"loss weights", 3, 0, weights.size()}, 0.0, 1.0, weights.data());
  context.stream().run([x, loss, weights] {
    double sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i)
      sum += weights[i] * (x.dtype() == DType::f64 ? x.data<double>()[i] : static_cast<double>(x.data<float>()[i]));
    *loss.data<double>() = sum;
  });
  if (Tape* tape = recording({x}, loss))
    tape->record("weighted_sum", loss, [x, weights, dy = loss.gradient()] {
      const GradientTarget target = x.gradient()->write();
      x.context().stream().run([target, weights, from = dy->value()] {
        const double upstream = *from.data<double>();
        for (std::size_t i = 0; i < weights.size(); ++i) {
          const double value = upstream * weights[i];
          if (target.tensor.dtype() == DType::f64) {
            double& out = target.tensor.data<double>()[i];
            out = target.accumulate ? out + value : value;
          } else {
            float& out = target.tensor.data<float>()[i];
            out = target.accumulate ? out + static_cast<float>(value) : static_cast<float>(value);
          }
        }
      });
    });
  return loss;
}

using Loss = std::function<Tensor()>;

inline double evaluate(Context& context, const Loss& loss) {
  const TapeScope none(context, nullptr);
  return loss().item();
}

/// The gradient of `input` through the tape.
inline std::vector<double> gradient_of(Context& context, const Loss& loss, const std::vector<Tensor>& inputs,
                                       std::size_t which) {
  for (const Tensor& input : inputs) input.gradient()->clear();
  Tape tape;
  {
    const TapeScope scope(context, &tape);
    const Tensor value = loss();
    tape.backward(value);
  }
  context.stream().synchronize();
  const Tensor gradient = inputs[which].gradient()->value();
  const double* data = gradient.data<double>();
  return {data, data + gradient.count()};
}

/// Largest difference between the tape's gradient and central differences, relative to the largest element (at least
/// 1).
inline double gradient_error(Context& context, const Loss& loss, const std::vector<Tensor>& inputs, std::size_t which) {
  const std::vector<double> computed = gradient_of(context, loss, inputs, which);
  double worst = 0, largest = 1;
  double* data = inputs[which].data<double>();
  for (std::size_t i = 0; i < computed.size(); ++i) {
    const double step = 1e-5, kept = data[i];
    data[i] = kept + step;
    const double above = evaluate(context, loss);
    data[i] = kept - step;
    const double below = evaluate(context, loss);
    data[i] = kept;
    const double difference = (above - below) / (2 * step);
    worst = std::max(worst, std::abs(difference - computed[i]));
    largest = std::max(largest, std::abs(difference));
  }
  return worst / largest;
}

inline void expect_gradients(Context& context, const Loss& loss, const std::vector<Tensor>& inputs,
                             double tolerance = 1e-7) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    EXPECT_LT(gradient_error(context, loss, inputs, i), tolerance)
        << "input " << i << " of shape " << to_string(inputs[i].shape());
}

}  // namespace tessera::nn::test
