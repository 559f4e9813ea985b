// Outputs of norms and activation functions that backward computes again: the same gradients, from less memory.
#include "tessera/nn/saved_tensor.h"

#include <gmock/gmock.h>

#include <map>
#include <string>

#include "tessera/nn/kernel_interceptor.h"
#include "tessera/nn/models/causal_model.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

constexpr std::int64_t kTokens = 2 * 9;

/// Counts the calls of each kernel.
class Counter final : public KernelInterceptor {
 public:
  void call(const KernelInvocation& call, Stream&, const std::function<void()>& run) override {
    ++calls[std::string(call.kernel)];
    run();
  }
  std::map<std::string, int> calls;
};

struct Step {
  std::vector<unsigned char> gradients;
  std::uint64_t kept = 0;  // activations in bytes when forward ends
  std::uint64_t left = 0;  // when backward ends
  std::map<std::string, int> calls;
};

Step step_of(const ModelConfig& config, DType dtype, const RecomputedOutputs& outputs,
             const std::function<void(CausalModel&)>& prepare = {}) {
  Counter counter;
  Context context({.runtime = observe(base::open_device({}), counter)});
  const auto model = make_model(context, config);
  model->set_dtype(dtype);
  model->materialize(0);
  context.set_recomputed(outputs);
  if (prepare) prepare(*model);
  std::vector<std::int32_t> values(kTokens);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i * 7 % 256);
  const Tensor tokens = ids(context, {2, 9}, values);
  const auto activations = [&] { return context.memory_tracker().snapshot().now_of(MemoryCategory::activation); };
  Step step;
  Tape tape;
  Tensor loss;
  {
    const TapeScope scope(context, &tape);
    loss = model->loss(tokens, tokens);
  }
  step.kept = activations();
  tape.backward(loss);
  step.left = activations();
  step.calls = counter.calls;
  for (const auto& parameter : model->parameters()) {
    const Tensor value = parameter->gradient().value();
    const auto* const bytes = static_cast<const unsigned char*>(value.raw());
    step.gradients.insert(step.gradients.end(), bytes, bytes + value.bytes());
  }
  return step;
}

constexpr RecomputedOutputs kNone{}, kActivations{.activations = true}, kNorms{.norms = true}, kBoth{true, true};

TEST(RecomputedOutputs, GradientsHaveTheSameBits) {
  for (const char* name : {"gpt-nano", "llama-nano"}) {
    ModelConfig config = preset(name);
    if (config.family == ModelConfig::Family::gpt2)
      config.residual_dropout = config.embedding_dropout = config.attention_dropout = 0.1;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Step without = step_of(config, dtype, kNone);
      for (const RecomputedOutputs& outputs : {kActivations, kNorms, kBoth}) {
        const Step with = step_of(config, dtype, outputs);
        EXPECT_EQ(with.gradients, without.gradients) << name;
        EXPECT_EQ(with.left, without.left) << name;
      }
    }
  }
}

TEST(RecomputedOutputs, ForwardKeepsLessByTheirBytes) {
  const ModelConfig gpt = preset("gpt-nano"), llama = preset("llama-nano");
  const auto saved = [](const ModelConfig& config, const RecomputedOutputs& outputs) {
    return step_of(config, DType::f32, kNone).kept - step_of(config, DType::f32, outputs).kept;
  };
  for (const ModelConfig& config : {gpt, llama}) {
    const auto elements = [&](std::int64_t row) { return static_cast<std::uint64_t>(4 * kTokens * row); };
    EXPECT_EQ(saved(config, kActivations), elements(config.layers * config.hidden)) << config.name;
    EXPECT_EQ(saved(config, kNorms), elements((2 * config.layers + 1) * config.width)) << config.name;
    EXPECT_EQ(saved(config, kBoth), saved(config, kActivations) + saved(config, kNorms)) << config.name;
  }
}

TEST(RecomputedOutputs, AreComputedOnceForAllTheirConsumers) {
  const ModelConfig llama = preset("llama-nano");
  const auto norms = static_cast<int>(2 * llama.layers + 1);
  const auto layers = static_cast<int>(llama.layers);
  const Step without = step_of(llama, DType::f32, kNone), with = step_of(llama, DType::f32, kBoth);
  EXPECT_EQ(without.calls.at("rms_norm_forward"), norms);
  EXPECT_EQ(with.calls.at("rms_norm_forward"), 2 * norms) << "an input norm has three consumers";
  EXPECT_EQ(without.calls.at("swiglu_forward"), layers);
  EXPECT_EQ(with.calls.at("swiglu_forward"), 2 * layers);
}

TEST(RecomputedOutputs, NormsWithHooksAreKept) {
  const ModelConfig config = preset("gpt-nano");
  const auto hooked = [](CausalModel& model) {
    model.find("h.0.ln_1").set_hooks({.pre_backward = [] {}});
    model.find("h.1.ln_2").set_hooks({.pre_backward = [] {}});
  };
  const Step all = step_of(config, DType::f32, kNorms), some = step_of(config, DType::f32, kNorms, hooked);
  EXPECT_EQ(some.kept, all.kept + static_cast<std::uint64_t>(2 * 4 * kTokens * config.width));
  EXPECT_EQ(some.gradients, all.gradients);
}

TEST(RecomputedOutputs, MemoryIsFreeAfterTheLastConsumer) {
  Context context;
  const auto held = [&] { return context.memory_tracker().snapshot().now_of(MemoryCategory::activation); };
  Tensor x = Tensor::zeros(context, {64}, DType::f32);
  const std::uint64_t before = held();
  x.set_recomputation(std::make_shared<Recomputation>([&] { return Tensor::zeros(context, {64}, DType::f32); }));
  std::optional<SavedTensor> first(x), second(x);
  x = Tensor();
  EXPECT_EQ(held(), before - 256) << "neither keeps it";
  const void* const result = first->get().raw();
  EXPECT_EQ(second->get().raw(), result);
  EXPECT_EQ(held(), before);
  first.reset();
  EXPECT_EQ(held(), before) << "the second may still read it";
  second.reset();
  EXPECT_EQ(held(), before - 256);
}

}  // namespace
}  // namespace tessera::nn::test
