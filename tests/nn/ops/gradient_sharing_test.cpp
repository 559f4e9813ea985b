// Gradients that share memory, parameters whose memory is acquired and released, and tied parameters.
#include <algorithm>
#include <numeric>

#include "tessera/nn/module.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/linear.h"
#include "tessera/nn/ops/norm.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

/// x used by several branches; their recording order determines which one writes x's gradient first.
Tensor branches(const Tensor& x, const Tensor& w, const std::vector<int>& order) {
  Tensor sum;
  for (const int branch : order) {
    Tensor y;
    switch (branch) {
      case 0:
        y = ops::scale(x, 1.0);
        break;
      case 1:
        y = ops::activation(ops::Activation::silu, x);
        break;
      case 2:
        y = ops::linear(x, w);
        break;
      default:
        y = ops::reshape(x, x.shape());
        break;
    }
    sum = sum ? ops::add(sum, ops::add(y, x)) : ops::add(x, y);
  }
  return weighted_sum(sum);
}

TEST(GradientSharing, GradientIsIndependentOfBranchOrder) {
  Context context;
  const Tensor x = leaf(context, {3, 4}, "x"), w = leaf(context, {4, 4}, "w");
  std::vector<int> order{0, 1, 2, 3};
  do {
    const Loss loss = [&] { return branches(x, w, order); };
    EXPECT_LT(gradient_error(context, loss, {x, w}, 0), 1e-7);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(GradientSharing, SharedGradientIsNotWritten) {
  Context context;
  const Tensor shared = leaf(context, {4}, "shared");
  Gradient a(context, {4}, DType::f64), b(context, {4}, DType::f64);
  a.accumulate(shared);
  b.accumulate(shared);
  EXPECT_EQ(a.value().raw(), shared.raw());  // the first one is not copied
  const GradientTarget target = a.write();
  EXPECT_TRUE(target.accumulate);
  EXPECT_NE(target.tensor.raw(), shared.raw());
  target.tensor.data<double>()[0] += 1.0;
  EXPECT_EQ(b.value().data<double>()[0], shared.data<double>()[0]);
}

/// Negative control: without write() the shared gradient is corrupted.
TEST(GradientSharing, DetectsWriteToSharedGradient) {
  Context context;
  const Tensor shared = leaf(context, {4}, "shared");
  Gradient a(context, {4}, DType::f64), b(context, {4}, DType::f64);
  a.accumulate(shared);
  b.accumulate(shared);
  const double before = b.value().data<double>()[0];
  a.value().data<double>()[0] += 1.0;  // without write()
  EXPECT_NE(b.value().data<double>()[0], before);
}

TEST(GradientSharing, LastOwnerAddsInPlace) {
  Context context;
  Gradient a(context, {4}, DType::f64);
  void* memory = nullptr;
  {
    const Tensor given = leaf(context, {4}, "given");
    memory = given.raw();
    a.accumulate(given);
  }
  EXPECT_EQ(a.write().tensor.raw(), memory);
}

TEST(GradientSharing, FirstWriteOverwritesAndLaterOnesAdd) {
  Context context;
  std::vector<double> memory(4, 1e300);  // garbage that must not be read
  Gradient gradient(context, {4}, DType::f64);
  gradient.bind(memory.data(), false);
  EXPECT_FALSE(gradient.write().accumulate);
  EXPECT_TRUE(gradient.write().accumulate);
  gradient.clear();
  EXPECT_FALSE(gradient.write().accumulate);
  gradient.bind(memory.data(), true);  // earlier microbatches are kept
  EXPECT_TRUE(gradient.write().accumulate);
}

TEST(GradientSharing, TiedParameterAddsIntoBoundMemory) {
  Context context;
  const Tensor x = leaf(context, {3, 4}, "x"), w = leaf(context, {4, 4}, "w");
  const Loss loss = [&] { return weighted_sum(ops::linear(ops::linear(x, w), w)); };
  const std::vector<double> expected = gradient_of(context, loss, {x, w}, 1);
  std::vector<double> memory(16, 1e300);
  w.gradient()->bind(memory.data(), false);
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(loss());
  EXPECT_EQ(memory, expected);
  EXPECT_LT(gradient_error(context, loss, {x}, 0), 1e-7);
}

class Handles : public testing::Test {
 protected:
  Context context_;
  Tensor weight_ = Tensor::unbound(context_, {4, 4}, DType::f64, "h.0.weight");
  Tensor x_ = leaf(context_, {3, 4}, "x");
  std::vector<double> values_ = std::vector<double>(16);
  void SetUp() override {
    fill_normal({"weight", 1, 0, 16}, 0.0, 1.0, values_.data());
    weight_.set_requires_grad(true);
  }
};

TEST_F(Handles, ParameterMayMoveBetweenForwardAndBackward) {
  std::vector<double> elsewhere = values_;
  weight_.bind(values_.data());
  const Loss loss = [&] {
    return weighted_sum(ops::linear(ops::layer_norm(x_, ops::reshape(leaf(context_, {4}, "g"), {4}), {}), weight_));
  };
  const std::vector<double> expected = gradient_of(context_, loss, {x_, weight_}, 0);
  x_.gradient()->clear();
  weight_.gradient()->clear();
  Tape tape;
  const TapeScope scope(context_, &tape);
  const Tensor value = loss();
  weight_.unbind("its unit is resharded");
  std::fill(values_.begin(), values_.end(), std::nan(""));
  weight_.bind(elsewhere.data());
  tape.backward(value);
  const double* got = x_.gradient()->value().data<double>();
  EXPECT_EQ(std::vector<double>(got, got + 12), expected);
}

TEST_F(Handles, ReadingAnUnboundParameterNamesIt) {
  weight_.bind(values_.data());
  Tape tape;
  const TapeScope scope(context_, &tape);
  const Tensor value = weighted_sum(ops::linear(x_, weight_));
  weight_.unbind("unit h.0 is resharded");
  try {
    tape.backward(value);
    FAIL() << "nothing was thrown";
  } catch (const InvalidUsage& error) {
    EXPECT_STREQ(error.what(), "h.0.weight is not readable: unit h.0 is resharded");
  }
  EXPECT_EQ(tape.size(), 0U);  // emptied, also when it throws
}

/// A caller may keep a result after backward, but its gradient then holds no memory.
TEST_F(Handles, BackwardReleasesGradientsOfResults) {
  weight_.bind(values_.data());
  Tape tape;
  const TapeScope scope(context_, &tape);
  const Tensor result = ops::linear(x_, weight_), value = weighted_sum(result);
  tape.backward(value);
  EXPECT_TRUE(x_.gradient()->written());
  EXPECT_FALSE(result.gradient()->written());
  EXPECT_FALSE(value.gradient()->written());
}

TEST_F(Handles, BackwardRejectsEmptyTape) {
  weight_.bind(values_.data());
  Tape tape;
  const Tensor value = weighted_sum(ops::linear(x_, weight_));
  EXPECT_THROW(tape.backward(value), InvalidUsage);
  EXPECT_THROW(tape.backward(x_), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::test
