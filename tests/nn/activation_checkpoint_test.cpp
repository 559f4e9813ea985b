// Activation checkpointing of regions: bitwise equal gradients, from less memory.
#include "tessera/nn/activation_checkpoint.h"

#include <gmock/gmock.h>

#include <cstring>

#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/attention.h"
#include "tessera/nn/ops/dropout.h"
#include "tessera/nn/ops/linear.h"
#include "tests/nn/ops/finite_differences.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;

/// Layers of a region: every kind of backward (in place, shared, with saved statistics, random).
struct Parts {
  Context context;
  Tensor x = leaf(context, {2, 3, 4}, "x"), in = leaf(context, {12, 4}, "in"), out = leaf(context, {4, 4}, "out");

  Tensor branch(const Tensor& from) const {
    const Tensor attended = ops::attention(ops::linear(from, in), 2);
    return ops::add(from, ops::dropout(ops::gelu_tanh(ops::linear(attended, out)), 0.5, "branch"));
  }
  Tensor plain(const Tensor& from) const { return branch(branch(from)); }
  Tensor twice(const Tensor& from) {  // nested
    return checkpoint(
        context,
        [this](const Tensor& given) {
          const Tensor middle = checkpoint(
              context, [this](const Tensor& t) { return branch(t); }, given);
          return branch(middle);
        },
        from);
  }

  using Region = std::function<Tensor(const Tensor&)>;
  /// Loss and gradients; x is used outside the region, too.
  std::vector<double> results(const Region& region, const std::function<void()>& between = {}) {
    for (const Tensor& t : {x, in, out}) t.gradient()->clear();
    Tape tape;
    Tensor loss;
    {
      const TapeScope scope(context, &tape);
      loss = weighted_sum(ops::add(ops::scale(region(ops::scale(x, 0.5)), 2.0), x));
    }
    if (between) between();
    tape.backward(loss);
    std::vector<double> all = {loss.item()};
    for (const Tensor& t : {x, in, out})
      all.insert(all.end(), t.gradient()->value().data<double>(), t.gradient()->value().data<double>() + t.count());
    return all;
  }
};

TEST(ActivationCheckpoint, IsBitwiseEqualAlsoNested) {
  Parts p;
  const auto plain = p.results([&](const Tensor& t) { return p.plain(t); });
  const auto region = [&](const Tensor& t) {
    return checkpoint(
        p.context, [&](const Tensor& given) { return p.plain(given); }, t);
  };
  EXPECT_EQ(p.results(region), plain);
  EXPECT_EQ(p.results([&](const Tensor& t) { return p.twice(t); }), plain);
  EXPECT_EQ(p.results([&](const Tensor& t) { return run_checkpointed(p.context, [&p, t] { return p.plain(t); }); }),
            plain)
      << "what a region captures gets gradients as its inputs do";
}

TEST(ActivationCheckpoint, RegionThatReturnsInputPassesGradient) {
  Parts p;
  const auto identity = [&](const Tensor& t) {
    return checkpoint(
        p.context, [](const Tensor& given) { return given; }, t);
  };
  const auto plain = p.results([&](const Tensor& t) { return p.plain(t); });
  EXPECT_EQ(p.results([&](const Tensor& t) { return identity(p.plain(identity(t))); }), plain);
}

TEST(ActivationCheckpoint, RecomputeUsesDropoutMasksOfForward) {
  Parts p;
  const auto later = [&] { p.context.random() = {.seed = 5, .step = 9, .first_sample = 100}; };
  const auto plain = p.results([&](const Tensor& t) { return p.plain(t); });
  const auto kept = p.results([&](const Tensor& t) { return p.twice(t); }, later);
  EXPECT_EQ(p.context.random().step, 9U) << "and the state of now is back";
  p.context.random() = {};
  EXPECT_EQ(kept, plain);
  {
    const EvaluationScope evaluating(p.context);
    const auto without = p.results([&](const Tensor& t) { return p.plain(t); });
    EXPECT_NE(without, plain);
    EXPECT_EQ(p.results([&](const Tensor& t) { return p.twice(t); }, [&] { p.context.set_training(true); }), without);
  }
  // The control: a region that reads the current random state draws other masks.
  const auto careless = [&](const Tensor& t) {
    return run_checkpointed(p.context, [&p, t, calls = std::make_shared<int>(0)] {
      p.context.random().step = static_cast<std::uint64_t>((*calls)++);
      return p.plain(t);
    });
  };
  EXPECT_NE(p.results(careless), plain);
}

TEST(ActivationCheckpoint, RecordsNothingWithoutTape) {
  Parts p;
  const Tensor result = p.twice(p.x);
  EXPECT_FALSE(result.requires_grad()) << "no tape";
  Tape tape;
  const TapeScope scope(p.context, &tape);
  for (const Tensor& t : {p.x, p.in, p.out}) const_cast<Tensor&>(t).set_requires_grad(false);
  EXPECT_FALSE(p.twice(p.x).requires_grad());
  EXPECT_EQ(tape.size(), 0U);
  p.out.set_requires_grad(true);
  EXPECT_TRUE(p.twice(p.x).requires_grad()) << "a parameter inside the region wants a gradient";
  EXPECT_EQ(tape.size(), 1U);
}

/// Peak activation memory of `calls` layers in a row, each of 5 linear layers with GELU.
std::uint64_t peak(int calls, bool checkpointed) {
  Context context;
  const Tensor x = leaf(context, {64, 32}, "x", DType::f32), w = leaf(context, {32, 32}, "w", DType::f32);
  context.memory_tracker().reset_peaks();
  const std::uint64_t before = context.memory_tracker().snapshot().now_of(MemoryCategory::activation);
  const auto layer = [&](const Tensor& from) {
    Tensor t = from;
    for (int i = 0; i < 5; ++i) t = ops::gelu_tanh(ops::linear(t, w));
    return t;
  };
  Tape tape;
  const TapeScope scope(context, &tape);
  Tensor t = x;
  for (int i = 0; i < calls; ++i) t = checkpointed ? checkpoint(context, layer, t) : layer(t);
  const Tensor loss = weighted_sum(t);
  t = Tensor();
  tape.backward(loss);
  return context.memory_tracker().snapshot().peak_of(MemoryCategory::activation) - before;
}

TEST(ActivationCheckpoint, RegionsCostTheirInputOnly) {
  const std::uint64_t input = 64 * 32 * sizeof(float);
  const std::uint64_t one = peak(1, true);
  EXPECT_LE(one, peak(1, false) + input) << "the region's result beside what the second call computes";
  for (const int calls : {2, 3, 7}) {
    EXPECT_EQ(peak(calls, true), peak(2, true) + static_cast<std::uint64_t>(calls - 2) * input);
    EXPECT_LE(peak(calls, true), one + static_cast<std::uint64_t>(calls - 1) * input);
    EXPECT_GT(peak(calls, false), one + static_cast<std::uint64_t>(calls - 1) * input) << "the control";
  }
}

// --- modules

struct Batch {
  Tensor tokens, targets;
};

Batch counting(Context& context) {
  std::vector<std::int32_t> values(2 * 9);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::int32_t>(i * 7 % 256);
  return {ids(context, {2, 9}, values), ids(context, {2, 9}, values)};
}

std::string story_of(Context& context, CausalModel& model) {
  std::string story;
  for (Module* module : model.modules()) {
    if (!module->is_block() && !module->path().empty() && !module->path().ends_with(".mlp")) continue;
    const std::string name = module->path().empty() ? "root" : module->path();
    const auto mark = [](Phase phase) { return phase == Phase::recompute ? " *" : " "; };
    module->set_hooks({.pre_forward = [&story, name, mark](Phase phase) { story += mark(phase) + ("+" + name); },
                       .post_forward = [&story, name, mark](Phase phase) { story += mark(phase) + ("-" + name); },
                       .pre_backward = [&story, name] { story += " <" + name; },
                       .post_backward = [&story, name] { story += " >" + name; }});
  }
  const Batch batch = counting(context);
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(model.loss(batch.tokens, batch.targets));
  return story;
}

TEST(CheckpointedModules, RecomputeInsideTheirBackward) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  model->materialize(0);
  EXPECT_EQ(checkpoint_activations(*model), 2);
  EXPECT_EQ(story_of(context, *model),
            " +root +h.0 +h.0.mlp -h.0.mlp -h.0 +h.1 +h.1.mlp -h.1.mlp -h.1 -root <root"
            " <h.1 *+h.1 *+h.1.mlp *-h.1.mlp *-h.1 <h.1.mlp >h.1.mlp >h.1"
            " <h.0 *+h.0 *+h.0.mlp *-h.0.mlp *-h.0 <h.0.mlp >h.0.mlp >h.0 >root");
  EXPECT_EQ(checkpoint_activations(*model, [](const Module& m) { return m.path() == "h.1.mlp"; }), 1);
  EXPECT_EQ(story_of(context, *model),
            " +root +h.0 +h.0.mlp -h.0.mlp -h.0 +h.1 +h.1.mlp -h.1.mlp -h.1 -root <root"
            " <h.1 <h.1.mlp *+h.1.mlp *-h.1.mlp >h.1.mlp >h.1 <h.0 <h.0.mlp >h.0.mlp >h.0 >root");
}

using Which = std::function<bool(const Module&)>;

std::vector<float> gradients(const ModelConfig& config, const std::optional<Which>& which) {
  Context context;
  const auto model = make_model(context, config);
  model->materialize(0);
  if (which) checkpoint_activations(*model, *which);
  const Batch batch = counting(context);
  Tape tape;
  {
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(batch.tokens, batch.targets);
    tape.backward(loss);
  }
  std::vector<float> all;
  for (const auto& parameter : model->parameters()) {
    const Tensor value = parameter->gradient().value();
    all.insert(all.end(), value.data<float>(), value.data<float>() + value.count());
  }
  return all;
}

TEST(CheckpointedModules, GradientsAreIndependentOfSelection) {
  for (const char* name : {"gpt-nano", "llama-nano"}) {
    ModelConfig config = preset(name);
    if (config.family == ModelConfig::Family::gpt2)
      config.residual_dropout = config.embedding_dropout = config.attention_dropout = 0.1;
    const auto none = gradients(config, std::nullopt);
    EXPECT_EQ(gradients(config, Which()), none) << name << ": the blocks";
    EXPECT_EQ(gradients(config, [](const Module& m) { return m.children().empty(); }), none) << name;
    EXPECT_EQ(gradients(config, [](const Module&) { return true; }), none) << name << ": each in the one around it";
    EXPECT_EQ(gradients(config, [](const Module& m) { return m.path().empty(); }), none) << name;
  }
}

/// Returns two tensors.
class Pair : public Layer<Pair> {
 public:
  using Layer::Layer;
  std::pair<Tensor, Tensor> forward(const Tensor& x) { return {x, x}; }
};

/// Returns a smaller result each time.
class Shrinking : public Layer<Shrinking> {
 public:
  using Layer::Layer;
  Tensor forward(const Tensor& x) { return ops::scale(ops::reshape(x, {x.count() / ++calls_, calls_}), 2.0); }

 private:
  std::int64_t calls_ = 0;
};

TEST(CheckpointedModules, RejectUnrepeatableModules) {
  Context context;
  const Tensor x = leaf(context, {4}, "x");
  Pair pair(context);
  pair.checkpoint_activations(true);
  EXPECT_THAT(error_of<InvalidUsage>([&] { pair(x); }), HasSubstr("does not return one tensor"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { checkpoint_activations(pair); }), HasSubstr("has no blocks"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { checkpoint_activations(pair, [](const Module&) { return false; }); }),
              HasSubstr("no module was picked"));
  Shrinking shrinking(context);
  shrinking.checkpoint_activations(true);
  Tape tape;
  const TapeScope scope(context, &tape);
  const Tensor loss = weighted_sum(shrinking(x));
  EXPECT_THAT(error_of<InvalidUsage>([&] { tape.backward(loss); }),
              HasSubstr("returned [4, 1] f64, but in the backward [2, 2] f64"));
  EXPECT_EQ(tape.size(), 0U);
}

TEST(CheckpointedModules, ExceptionInRecomputeKeepsTapeAndContextUsable) {
  struct Thrown {};
  Parts p;
  int calls = 0;
  const auto fails = [&](const Tensor& t) {
    return run_checkpointed(p.context, [&p, &calls, t] {
      const Tensor y = p.plain(t);
      if (++calls == 2) throw Thrown{};
      return y;
    });
  };
  const auto plain = p.results([&](const Tensor& t) { return p.plain(t); });
  EXPECT_THROW(p.results(fails), Thrown);
  EXPECT_EQ(p.context.tape(), nullptr);
  EXPECT_EQ(p.results(fails), plain);
}

}  // namespace
}  // namespace tessera::nn::test
