// The same training on other devices: nothing but kernels and copies touches a tensor's memory.
#include <gtest/gtest.h>

#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"
#include "tests/harness/guarded_device.h"

namespace tessera::nn::test {
namespace {

Tensor counting_ids(Context& context, int later) {
  const Shape shape = {3, 21};
  Tensor ids = Tensor::empty(context, shape, DType::i32);
  upload(context, ids.raw(), ids.bytes(), [&](void* out) {
    for (int i = 0; i < 63; ++i) static_cast<std::int32_t*>(out)[i] = (5 * (i / 21) + i % 21 + later) % 17;
  });
  return ids;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<std::vector<float>> parameters;
  bool operator==(const Outcome&) const = default;
};

/// `read`: whether losses and parameters are looked at.
Outcome train(const char* name, Context& context, bool read = true) {
  ModelConfig config = preset(name);
  config.embedding_dropout = config.residual_dropout = config.attention_dropout = 0.1;
  const auto model = make_model(context, config);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Tensor tokens = counting_ids(context, 0), targets = counting_ids(context, 1);
  Outcome outcome;
  for (int step = 1; step <= 3; ++step) {
    context.random().step = static_cast<std::uint64_t>(step);
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(tokens, targets);
    tape.backward(loss);
    optimizer.step(3e-3);
    if (read) outcome.losses.push_back(loss.item());
  }
  for (const auto& parameter : model->parameters()) {
    if (!read) break;
    const Tensor& tensor = parameter->tensor();
    download(context, tensor.raw(), tensor.bytes(), [&](const void* data) {
      const auto* values = static_cast<const float*>(data);
      outcome.parameters.emplace_back(values, values + tensor.count());
    });
  }
  return outcome;
}

class Devices : public testing::TestWithParam<const char*> {};

TEST_P(Devices, TheHostTouchesNothingOfAnotherDevice) {
  Context host, guarded({.threads = 2, .runtime = harness::make_guarded_device()});
  EXPECT_EQ(train(GetParam(), guarded), train(GetParam(), host));
  EXPECT_EQ(guarded.device().type, DeviceType::cuda);
}

TEST_P(Devices, ARunWithoutDataNeedsTheSameMemory) {
  Context host, meta({.device = {DeviceType::meta, 0}});
  train(GetParam(), host);
  train(GetParam(), meta, false);
  const auto real = host.ledger().snapshot(), planned = meta.ledger().snapshot();
  EXPECT_EQ(planned.peak, real.peak);
  EXPECT_EQ(planned.total_peak, real.total_peak);
  EXPECT_EQ(planned.reserved, real.reserved);
  EXPECT_GT(planned.total_peak, 1'000'000U);
}

INSTANTIATE_TEST_SUITE_P(Models, Devices, testing::Values("gpt-nano", "llama-nano"),
                         [](const auto& given) { return std::string(given.param).substr(0, 3); });

TEST(GuardedDevice, SeesAHostThatTouchesATensor) {
  Context context({.runtime = harness::make_guarded_device()});
  const Tensor x = Tensor::zeros(context, {3}, DType::f32);
  EXPECT_DEATH(x.data<float>()[0] = 1.0F, "");
  const Tensor one = Tensor::zeros(context, {}, DType::f32);
  EXPECT_EQ(one.item(), 0.0);
}

TEST(MetaDevice, SaysThatThereIsNothingToRead) {
  Context context({.device = {DeviceType::meta, 0}});
  const Tensor x = Tensor::zeros(context, {}, DType::f32);
  EXPECT_THROW(x.item(), InvalidUsage);
  EXPECT_DEATH(x.data<float>()[0] = 1.0F, "");
  // Memory is booked, not there.
  const Tensor huge = Tensor::empty(context, {1 << 20, 1 << 20}, DType::f32);
  EXPECT_EQ(context.ledger().snapshot().now_of(MemoryUse::activation), (std::uint64_t{1} << 42U) + 4);
}

TEST(HostDevice, HasNoKernelsForSixteenBits) {
  Context context;
  EXPECT_THROW(context.kernels<bf16>("add"), Unsupported);
}

}  // namespace
}  // namespace tessera::nn::test
