// Module buffers: names, types, memory, and when a layer may change them.
#include <gmock/gmock.h>

#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tests/nn/ops/finite_differences.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Shapes, BeyondMemoryAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  for (const Shape& shape : {Shape{kHuge, kHuge}, Shape{std::int64_t{1} << 61}, Shape{kHuge, 1 << 20, 2}, Shape{-1, 4}})
    EXPECT_THROW(count_of(shape), InvalidUsage) << to_string(shape);
  Context context;
  EXPECT_THROW(Tensor::zeros(context, {kHuge, kHuge}, DType::f32), InvalidUsage);
  EXPECT_EQ(count_of({3, 0, 4}), 0);  // the controls
  EXPECT_EQ(count_of({kHuge, 1 << 10}), kHuge << 10);
}

class Counter : public Layer<Counter> {
 public:
  explicit Counter(Context& context)
      : Layer(context),
        mean(add_buffer("mean", {3}, {.init = Init::normal(1)})),
        follows(add_buffer("follows", {2}, {.init = Init::ones(), .persistent = false, .follows_dtype = true})),
        steps(add_buffer("steps", {}, {.dtype = DType::i64})) {}
  Tensor forward(const Tensor& x) {
    updates.push_back(updates_buffers());
    return ops::scale(x, 2);
  }
  void also(const std::string& name, BufferOptions options = {}) { add_buffer(name, {1}, options); }
  const ModuleBuffer &mean, &follows, &steps;
  std::vector<bool> updates;
};

class Outer : public Layer<Outer> {
 public:
  explicit Outer(Context& context)
      : Layer(context),
        linear(add<Linear>("linear", LinearOptions{.in = 4, .out = 4})),
        first(add<Counter>("a.first")),
        second(add<Counter>("a.second")) {}
  Linear& linear;
  Counter &first, &second;
};

std::vector<std::string> names_of(const std::vector<std::shared_ptr<ModuleBuffer>>& buffers) {
  std::vector<std::string> names;
  for (const auto& buffer : buffers) names.push_back(buffer->name());
  return names;
}

TEST(ModuleBuffers, AreNamedByPathAndAreNoParameters) {
  Context context;
  const Outer model(context);
  EXPECT_THAT(names_of(model.buffers()), ElementsAre("a.first.mean", "a.first.follows", "a.first.steps",
                                                     "a.second.mean", "a.second.follows", "a.second.steps"));
  EXPECT_EQ(model.own_buffers().size(), 0U);
  EXPECT_EQ(model.first.own_buffers().size(), 3U);
  EXPECT_EQ(model.parameters().size(), 2U);
  EXPECT_FALSE(model.first.mean.tensor().requires_grad());
  EXPECT_FALSE(model.first.follows.persistent());
}

/// As Linear::use_fp8() does.
TEST(ModuleBuffers, AddedToAModuleOfAModelHaveItsPath) {
  Context context;
  Outer model(context);
  model.first.also("late");
  EXPECT_THAT(names_of(model.first.own_buffers()), testing::Contains("a.first.late"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { model.first.also("late"); }), HasSubstr("already has"));
}

TEST(ModuleBuffers, StayF32UnlessTheyFollowModel) {
  Context context;
  Outer model(context);
  model.set_dtype(DType::bf16);
  EXPECT_EQ(model.first.mean.dtype(), DType::f32);
  EXPECT_EQ(model.first.follows.dtype(), DType::bf16);
  EXPECT_EQ(model.first.steps.dtype(), DType::i64);
  model.first.set_dtype(DType::f32);
  EXPECT_EQ(model.first.follows.dtype(), DType::f32);
  EXPECT_EQ(model.second.follows.dtype(), DType::bf16);
  model.materialize(1);
  EXPECT_EQ(static_cast<float>(model.second.follows.tensor().data<bf16>()[1]), 1.0F);
  EXPECT_THAT(error_of<InvalidUsage>([&] { model.set_dtype(DType::f32); }), HasSubstr("already has memory"));
}

TEST(ModuleBuffers, InitializeFromSeedAndNameAndAreTrackedAsOther) {
  const auto first_mean = [](std::uint64_t seed) {
    Context context;
    Outer model(context);
    EXPECT_THAT(error_of<InvalidUsage>([&] { model.first.mean.tensor().data<float>(); }),
                HasSubstr("a.first.mean is not readable: it has no memory yet"));
    model.materialize(seed);
    const auto now = context.memory_tracker().snapshot();
    EXPECT_EQ(now.now_of(MemoryCategory::other), 2U * (3 * 4 + 2 * 4 + 8));
    EXPECT_EQ(now.now_of(MemoryCategory::parameter), (16U + 4) * 4);
    EXPECT_EQ(*model.first.steps.tensor().data<std::int64_t>(), 0);
    const auto values = [](const ModuleBuffer& b) {
      return std::vector(b.tensor().data<float>(), b.tensor().data<float>() + b.count());
    };
    EXPECT_NE(values(model.first.mean), values(model.second.mean));
    return values(model.first.mean);
  };
  EXPECT_EQ(first_mean(3), first_mean(3));
  EXPECT_NE(first_mean(3), first_mean(4)) << "the control";
}

TEST(ModuleBuffers, RejectInvalidOptions) {
  Context context;
  Counter counter(context);
  EXPECT_THAT(error_of<InvalidUsage>([&] { counter.also("mean"); }),
              HasSubstr("already has a parameter or buffer of that name"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { counter.also("x", {.dtype = DType::i32, .init = Init::ones()}); }),
              HasSubstr("integer buffers start as zeros"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { counter.also("x", {.dtype = DType::i32, .follows_dtype = true}); }),
              HasSubstr("keep their dtype"));
  EXPECT_THAT(error_of<InvalidUsage>([&] { counter.also("x", {.dtype = DType::u64}); }), HasSubstr("i32, i64 or u8"));
}

TEST(ModuleBuffers, ChangeInTrainingForwardButNotInRecompute) {
  Context context;
  Counter counter(context);
  Tensor x = leaf(context, {2}, "x");
  counter(x);
  {
    const EvaluationScope evaluation(context);
    counter(x);
  }
  EXPECT_THAT(counter.updates, ElementsAre(true, false));
  counter.updates.clear();
  for (const bool checkpointed : {false, true}) {
    counter.checkpoint_activations(checkpointed);
    Tape tape;
    const TapeScope scope(context, &tape);
    tape.backward(weighted_sum(counter(x)));
  }
  EXPECT_THAT(counter.updates, ElementsAre(true, true, false)) << "once, and once with its repetition";
  counter.updates.clear();
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(weighted_sum(checkpoint(
      context,
      [&](const Tensor& t) {
        return checkpoint(
            context, [&](const Tensor& u) { return counter(u); }, t);
      },
      x)));
  EXPECT_TRUE(counter.updates.at(0));
  for (std::size_t i = 1; i < counter.updates.size(); ++i) EXPECT_FALSE(counter.updates[i]) << i;
  EXPECT_GT(counter.updates.size(), 2U);
}

}  // namespace
}  // namespace tessera::nn::test
