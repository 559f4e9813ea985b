// The linear layer in 8-bit floating point: against the same layer of dequantized operands in double, against finite
// differences of the f32 layer, and what it keeps in memory.
#include "tessera/nn/ops/fp8_linear.h"

#include "tessera/base/error.h"
#include "tessera/nn/kernels/fp8.h"
#include "tessera/nn/layers/linear.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

using ops::WeightLayout;

constexpr std::int64_t kRows = 24, kIn = 32, kOut = 48;  // rows: no multiple of kFp8Multiple, so padded

std::vector<double> numbers(const Tensor& x) {
  return std::vector<double>(x.data<float>(), x.data<float>() + x.count());
}

/// What quantization leaves of a tensor.
std::vector<double> dequantized(const Tensor& x, Fp8Format format) {
  std::vector<double> values = numbers(x);
  double amax = 0;
  for (const double value : values) amax = std::max(amax, std::abs(value));
  const int e = fp8_exponent(format, static_cast<float>(amax));
  for (double& value : values)
    value = std::ldexp(decode_fp8(format, encode_fp8(format, static_cast<float>(std::ldexp(value, e)))), -e);
  return values;
}

struct Layer {
  explicit Layer(WeightLayout stored)
      : layout(stored),
        x(leaf(context, {2, kRows / 2, kIn}, "x", DType::f32)),
        weight(leaf(context, out_in() ? Shape{kOut, kIn} : Shape{kIn, kOut}, "w", DType::f32)),
        bias(leaf(context, {kOut}, "b", DType::f32)),
        dy(static_cast<std::size_t>(kRows * kOut)) {
    fill_normal({"loss weights", 3, 0, dy.size()}, 0.0, 1.0, dy.data());  // as weighted_sum()
  }
  bool out_in() const { return layout == WeightLayout::out_in; }
  std::size_t at(std::size_t in, std::size_t out) const {
    return out_in() ? out * static_cast<std::size_t>(kIn) + in : in * static_cast<std::size_t>(kOut) + out;
  }
  Tensor fp8(const ops::Fp8Recipe& recipe = {}) { return ops::fp8_linear(x, weight, bias, layout, recipe); }
  void backward(const Loss& loss) {
    Tape tape;
    const TapeScope scope(context, &tape);
    tape.backward(loss());
  }

  Context context;
  WeightLayout layout;
  Tensor x, weight, bias;
  std::vector<double> dy;
};

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

struct Results {
  std::vector<double> y, dx, dweight, dbias;
};

/// The layer in double, of given operands.
Results reference(const Layer& layer, const std::vector<double>& x, const std::vector<double>& weight,
                  const std::vector<double>& dy) {
  constexpr auto rows = static_cast<std::size_t>(kRows), in = static_cast<std::size_t>(kIn),
                 out = static_cast<std::size_t>(kOut);
  Results r{std::vector<double>(rows * out), std::vector<double>(rows * in), std::vector<double>(in * out),
            std::vector<double>(out)};
  const std::vector<double> bias = numbers(layer.bias);
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t o = 0; o < out; ++o) {
      r.y[row * out + o] = bias[o];
      r.dbias[o] += layer.dy[row * out + o];  // of the gradient before quantization
      for (std::size_t i = 0; i < in; ++i) {
        r.y[row * out + o] += x[row * in + i] * weight[layer.at(i, o)];
        r.dx[row * in + i] += dy[row * out + o] * weight[layer.at(i, o)];
        r.dweight[layer.at(i, o)] += dy[row * out + o] * x[row * in + i];
      }
    }
  return r;
}

Results run(Layer& layer, const ops::Fp8Recipe& recipe = {}) {
  std::vector<double> y;
  layer.backward([&] {
    const Tensor out = layer.fp8(recipe);
    y = numbers(out);
    return weighted_sum(out);
  });
  return {y, numbers(layer.x.gradient()->value()), numbers(layer.weight.gradient()->value()),
          numbers(layer.bias.gradient()->value())};
}

TEST(Fp8Linear, EqualsDoubleReferenceOfQuantizedOperands) {
  for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
    Layer layer(layout);
    const Results fp8 = run(layer);
    Tensor dy = Tensor::empty(layer.context, {kRows, kOut}, DType::f32);
    std::copy(layer.dy.begin(), layer.dy.end(), dy.data<float>());
    const std::vector<double> x = dequantized(layer.x, Fp8Format::e4m3),
                              weight = dequantized(layer.weight, Fp8Format::e4m3);
    const Results expected = reference(layer, x, weight, dequantized(dy, Fp8Format::e5m2));
    EXPECT_LT(difference(fp8.y, expected.y), 1e-6);
    EXPECT_LT(difference(fp8.dx, expected.dx), 1e-6);
    EXPECT_LT(difference(fp8.dweight, expected.dweight), 1e-6);
    EXPECT_LT(difference(fp8.dbias, expected.dbias), 1e-6);
    // The control: with another format for the gradient, or without quantization, the reference differs.
    EXPECT_GT(difference(fp8.dx, reference(layer, x, weight, dequantized(dy, Fp8Format::e4m3)).dx), 1e-3);
    EXPECT_GT(difference(fp8.y, reference(layer, numbers(layer.x), weight, layer.dy).y), 1e-3);
  }
}

/// The f32 layer is linear in each operand, so its differences are exact; the bounds follow from half a unit of the
/// last place of each format, 1/16 and 1/8, of terms whose errors are independent.
TEST(Fp8Linear, GradientsEqualFiniteDifferencesOfF32LayerWithinFormatsError) {
  Layer layer(WeightLayout::in_out);
  const Results fp8 = run(layer);
  const auto differences = [&](const Tensor& operand) {
    std::vector<double> gradient;
    float* const values = operand.data<float>();
    const auto loss = [&] {
      return evaluate(layer.context,
                      [&] { return weighted_sum(ops::linear(layer.x, layer.weight, layer.bias, layer.layout)); });
    };
    for (std::int64_t i = 0; i < operand.count(); i += 7) {
      const float old = values[i];
      values[i] = old + 1;
      const double above = loss();
      values[i] = old - 1;
      gradient.push_back((above - loss()) / 2);
      values[i] = old;
    }
    return gradient;
  };
  const auto every_seventh = [](const std::vector<double>& all) {
    std::vector<double> some;
    for (std::size_t i = 0; i < all.size(); i += 7) some.push_back(all[i]);
    return some;
  };
  const double dx = difference(every_seventh(fp8.dx), differences(layer.x)),
               dweight = difference(every_seventh(fp8.dweight), differences(layer.weight)),
               dbias = difference(every_seventh(fp8.dbias), differences(layer.bias));
  EXPECT_LT(dx, 0.1);
  EXPECT_GT(dx, 1e-3) << "it is quantized";
  EXPECT_LT(dweight, 0.1);
  EXPECT_GT(dweight, 1e-3);
  EXPECT_LT(dbias, 1e-4) << "it is not quantized";
}

TEST(Fp8Linear, SecondBackwardAddsToGradients) {
  Layer layer(WeightLayout::out_in);
  const Results once = run(layer), twice = run(layer);
  for (std::size_t i = 0; i < once.dweight.size(); ++i)
    ASSERT_NEAR(twice.dweight[i], 2 * once.dweight[i], 1e-4 * std::abs(once.dweight[i]) + 1e-5);
  for (std::size_t i = 0; i < once.dx.size(); ++i)
    ASSERT_NEAR(twice.dx[i], 2 * once.dx[i], 1e-4 * std::abs(once.dx[i]) + 1e-5);
}

TEST(Fp8Linear, FrozenWeightKeepsNothingOfX) {
  Layer layer(WeightLayout::out_in);
  const auto kept = [&] {
    Tape tape;
    const TapeScope scope(layer.context, &tape);
    const Tensor y = layer.fp8();
    return layer.context.memory_tracker().snapshot().now_of(MemoryCategory::activation) - y.bytes();
  };
  const std::uint64_t trained = kept();
  layer.weight.set_requires_grad(false);
  const std::uint64_t frozen = kept();
  // 8 bits for each of x's elements, with the rows padded
  EXPECT_EQ(trained - frozen, static_cast<std::uint64_t>(kIn) * kernels::fp8_padded(static_cast<std::size_t>(kRows)));
}

TEST(Fp8Linear, LayerRejectsWhatItCannotMultiply) {
  Context context;
  Linear odd(context, {.in = 24, .out = 32});
  EXPECT_THROW(odd.use_fp8(Fp8Scaling::current), InvalidUsage);
  Linear quantized(context, {.in = 64, .out = 64});
  quantized.quantize();
  EXPECT_THROW(quantized.use_fp8(Fp8Scaling::current), InvalidUsage);
  Linear layer(context, {.in = 16, .out = 32});
  layer.use_fp8(Fp8Scaling::delayed);
  EXPECT_THROW(layer.use_fp8(Fp8Scaling::current), InvalidUsage);
  ASSERT_EQ(layer.buffers().size(), 1U);
  EXPECT_EQ(layer.buffers()[0]->shape(), (Shape{3, 1 + kFp8History}));
}

/// Forward and backward of a layer with delayed scaling fill the three histories, once for each call.
TEST(Fp8Linear, LayerKeepsHistoriesOfAmaxes) {
  Context context;
  Linear layer(context, {.in = 16, .out = 32});
  layer.use_fp8(Fp8Scaling::delayed);
  layer.materialize(1);
  const Tensor x = leaf(context, {8, 16}, "x", DType::f32);
  const float* const history = layer.buffers()[0]->tensor().data<float>();
  const auto newest = [&](std::size_t place) { return history[place * (1 + kFp8History)]; };
  const auto amax = [](const Tensor& tensor) {
    float most = 0;
    for (std::int64_t i = 0; i < tensor.count(); ++i) most = std::max(most, std::abs(tensor.data<float>()[i]));
    return most;
  };
  {
    const EvaluationScope evaluation(context);
    layer(x);
    EXPECT_EQ(newest(0), 0) << "an evaluation";
  }
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(weighted_sum(layer(x)));
  EXPECT_EQ(newest(0), amax(x));
  EXPECT_EQ(newest(1), amax(layer.weight().tensor()));
  EXPECT_GT(newest(2), 1.0F);
  EXPECT_EQ(history[1], 0) << "one update";
}

}  // namespace
}  // namespace tessera::nn::test
