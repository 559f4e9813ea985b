// Layers one after another, tensors from host memory, operators, and backward of the recorded loss.
#include "tessera/nn/layers/sequential.h"

#include <gmock/gmock.h>

#include <array>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/host_access.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"

namespace tessera::nn::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<float> values(const Tensor& x) { return {x.data<float>(), x.data<float>() + x.count()}; }

TEST(SequentialTest, CallsInOrderAndNamesAsPyTorchDoes) {
  Context context;
  Sequential model(context);
  model.append<Linear>(LinearOptions{3, 4}).append(ops::relu).append<Linear>(LinearOptions{4, 2, false});
  std::vector<std::string> names;
  for (const auto& parameter : model.parameters()) names.push_back(parameter->name());
  EXPECT_THAT(names, ElementsAre("0.weight", "0.bias", "2.weight"));
  model.materialize(7);
  const Tensor x = Tensor::from(context, std::array{1.0F, -2.0F, 0.5F}, {1, 3});
  auto& first = dynamic_cast<Linear&>(*model.children()[0]);
  auto& second = dynamic_cast<Linear&>(*model.children()[1]);
  EXPECT_EQ(values(model(x)), values(second(ops::relu(first(x)))));
  EXPECT_NE(values(model(x)), values(second(first(x)))) << "the control: without relu";
}

TEST(SequentialTest, WithoutLayersIsItsInput) {
  Context context;
  Sequential model(context);
  EXPECT_THAT(values(model(Tensor::from(context, std::array{1.0F, 2.0F}, {2}))), ElementsAre(1, 2));
}

TEST(SequentialTest, LossOfRecordingScopeRunsBackward) {
  Context context;
  Sequential model(context);
  model.append<Linear>(LinearOptions{2, 1, false});
  model.materialize(0);
  const Tensor x = Tensor::from(context, std::array{3.0F, 5.0F}, {1, 2});
  const Tensor& weight = model.parameters()[0]->tensor();
  const TapeScope recording(context);
  ops::reshape(2.0 * model(x), {1}).backward();
  EXPECT_THAT(values(weight.gradient()->value()), ElementsAre(6, 10));
  const Tensor again = ops::reshape(model(x), {1});
  again.backward(0.5);
  EXPECT_THAT(values(weight.gradient()->value()), ElementsAre(7.5, 12.5)) << "gradients add up";
  EXPECT_THAT([&] { again.backward(); }, ThrowsMessage<InvalidUsage>(HasSubstr("nothing was recorded for this loss")));
}

TEST(SequentialTest, BackwardOutsideOfScopeIsRefused) {
  Context context;
  const Tensor loss = Tensor::zeros(context, {1}, DType::f32);
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<InvalidUsage>(HasSubstr("in one TapeScope")));
  {
    const TapeScope recording(context);
    const TapeScope none(context, nullptr);
    EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<InvalidUsage>(HasSubstr("in one TapeScope")));
  }
}

TEST(TensorFrom, CopiesValuesOfTheirType) {
  Context context;
  std::vector<std::int32_t> tokens = {1, 2, 3, 4, 5, 6};
  const Tensor x = Tensor::from(context, tokens, {2, 3});
  tokens[0] = 9;
  EXPECT_EQ(x.dtype(), DType::i32);
  EXPECT_THAT(std::vector(x.data<std::int32_t>(), x.data<std::int32_t>() + 6), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(Tensor::from(context, std::span<const double>(), {0, 3}).count(), 0);
  EXPECT_THAT(
      [&] {
        Tensor::from(context, tokens, {2, 4});
      },
      ThrowsMessage<InvalidUsage>(HasSubstr("has 8 elements, 6 values were given")));
}

TEST(TensorOperators, AreSumsAndProductsByNumbers) {
  Context context;
  const Tensor a = Tensor::from(context, std::array{1.0F, 2.0F}, {2});
  const Tensor b = Tensor::from(context, std::array{0.5F, -4.0F}, {2});
  EXPECT_THAT(values(a + b), ElementsAre(1.5, -2));
  EXPECT_THAT(values(a - b), ElementsAre(0.5, 6));
  EXPECT_THAT(values(3 * a), ElementsAre(3, 6));
  EXPECT_THAT(values(b * 2), ElementsAre(1, -8));
}

}  // namespace
}  // namespace tessera::nn::test
