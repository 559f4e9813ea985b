// Modules with a dtype of their own: inputs, outputs, and rejected settings.
#include <gmock/gmock.h>

#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/models/gpt2.h"
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/cast.h"
#include "tests/nn/ops/finite_differences.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Returns its input and records the dtype.
class Probe : public Layer<Probe> {
 public:
  Probe(Context& context, std::vector<DType>& seen) : Layer(context), seen_(seen) {}
  Tensor forward(const Tensor& x) {
    seen_.push_back(x.dtype());
    return ops::scale(x, 1);
  }

 private:
  std::vector<DType>& seen_;
};

/// before, linear, inside (a module of its own: norm and probe), after.
class Inner : public Layer<Inner> {
 public:
  Inner(Context& context, std::vector<DType>& seen)
      : Layer(context), norm_(add<LayerNorm>("norm", NormOptions{.width = 4})), probe_(add<Probe>("probe", seen)) {}
  Tensor forward(const Tensor& x) { return probe_(norm_(x)); }
  Tensor without_boundary(const Tensor& x) { return norm_.forward(x); }

 private:
  LayerNorm& norm_;
  Probe& probe_;
};

class Outer : public Layer<Outer> {
 public:
  Outer(Context& context, std::vector<DType>& seen)
      : Layer(context),
        linear_(add<Linear>("linear", LinearOptions{.in = 4, .out = 4, .deviation = 0.5})),
        inner_(add<Inner>("inner", seen)),
        after_(add<Probe>("after", seen)) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = linear_(x);
    return after_(ops::add(y, inner_(y)));
  }
  Inner& inner() { return inner_; }

 private:
  Linear& linear_;
  Inner& inner_;
  Probe& after_;
};

Tensor filled(Context& context, DType dtype) {
  Tensor x = Tensor::empty(context, {3, 4}, dtype);
  fill_initial(context, {Init::normal(1), "x", 5, {0, x.count()}}, dtype, x.raw());
  return x;
}

struct Model {
  Context context;
  std::vector<DType> seen;
  Outer outer{context, seen};

  /// Dtypes of the whole model and of `inner`.
  Model(DType whole, DType inner) {
    outer.set_dtype(whole);
    outer.find("inner").set_dtype(inner);
  }
  /// Values, then gradients of all parameters, in order.
  std::vector<float> results() {
    Tape tape;
    Tensor y;
    {
      const TapeScope scope(context, &tape);
      y = ops::cast(outer(filled(context, outer.dtype())), DType::f32);
      tape.backward(weighted_sum(y));
    }
    std::vector<float> all(y.data<float>(), y.data<float>() + y.count());
    for (const auto& parameter : outer.parameters()) {
      EXPECT_EQ(parameter->gradient().value().dtype(), parameter->dtype());
      const Tensor f32_gradient = ops::cast(parameter->gradient().value(), DType::f32);
      all.insert(all.end(), f32_gradient.data<float>(), f32_gradient.data<float>() + f32_gradient.count());
      parameter->gradient().clear();
    }
    return all;
  }
};

TEST(DtypeBoundaries, CastInputsAndCastOutputsBack) {
  for (const auto& [whole, inner] : {std::pair(DType::bf16, DType::f32), std::pair(DType::f32, DType::bf16),
                                     std::pair(DType::f16, DType::bf16), std::pair(DType::bf16, DType::bf16)}) {
    Model model(whole, inner);
    model.outer.materialize(1);
    model.results();
    EXPECT_THAT(model.seen, ElementsAre(inner, whole));
    EXPECT_EQ(model.outer.find("inner.norm").dtype(), inner) << "what is below has it, too";
    EXPECT_EQ(model.outer.find("linear").dtype(), whole);
  }
}

TEST(DtypeBoundaries, ExistWhereDtypeChangesOnly) {
  Model model(DType::bf16, DType::bf16), plain(DType::bf16, DType::f32);
  plain.outer.set_dtype(DType::bf16);  // set_dtype of the whole overrides that of its parts
  model.outer.materialize(1);
  plain.outer.materialize(1);
  const auto nodes = [](Model& m) {
    Tape tape;
    const TapeScope scope(m.context, &tape);
    m.outer(filled(m.context, DType::bf16));
    return tape.size();
  };
  EXPECT_EQ(nodes(model), nodes(plain));
  EXPECT_EQ(model.results(), plain.results());
  Model mixed(DType::bf16, DType::f32);
  mixed.outer.materialize(1);
  EXPECT_EQ(nodes(mixed), nodes(plain) + 2) << "one cast in, one back";
}

TEST(DtypeBoundaries, GradientsEqualF32WithinRounding) {
  const auto results = [](DType whole, DType inner) {
    Model model(whole, inner);
    model.outer.materialize(1);
    return model.results();
  };
  const std::vector<float> exact = results(DType::f32, DType::f32), mixed = results(DType::bf16, DType::f32);
  ASSERT_EQ(exact.size(), mixed.size());
  double largest = 0, error = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    largest = std::max<double>(largest, std::abs(exact[i]));
    error = std::max<double>(error, std::abs(exact[i] - mixed[i]));
  }
  EXPECT_LT(error, 0x1p-5 * largest);
  EXPECT_GT(error, 0);
}

TEST(DtypeBoundaries, DetectMissingBoundary) {
  Model model(DType::bf16, DType::f32);
  model.outer.materialize(1);
  const Tensor x = filled(model.context, DType::bf16);
  EXPECT_THAT(error_of<InvalidUsage>([&] { model.outer.inner().without_boundary(x); }),
              HasSubstr("layer_norm: weight is f32, needs bf16"));
}

TEST(DtypeBoundaries, CheckpointedModulesKeepInputBeforeCast) {
  Model plain(DType::bf16, DType::f32), checkpointed(DType::bf16, DType::f32);
  plain.outer.materialize(1);
  checkpointed.outer.materialize(1);
  checkpointed.outer.inner().checkpoint_activations(true);
  EXPECT_EQ(checkpointed.results(), plain.results());
  EXPECT_THAT(checkpointed.seen, ElementsAre(DType::f32, DType::bf16, DType::f32)) << "computed again in the backward";
  EXPECT_EQ(plain.seen.size(), 2U) << "the control";
  // Such a call keeps its bf16 input, not a cast of it.
  const auto held = [](Model& m) {
    const Tensor x = filled(m.context, DType::bf16);
    Tape tape;
    const TapeScope scope(m.context, &tape);
    const auto before = m.context.memory_tracker().snapshot().now_of(MemoryCategory::activation);
    const Tensor y = m.outer.inner()(x);
    return m.context.memory_tracker().snapshot().now_of(MemoryCategory::activation) - before - y.bytes();
  };
  EXPECT_EQ(held(checkpointed), 0U);
  EXPECT_GE(held(plain), 3U * 4 * 4);
}

/// Returns its input in several ways.
class Many : public Layer<Many> {
 public:
  using Layer::Layer;
  std::pair<Tensor, std::tuple<Tensor, int>> forward(const Tensor& x, const Tensor& ids, const Tensor& loss) {
    inside = {x.dtype(), ids.dtype(), loss.dtype()};
    return {x, {ops::scale(x, 2), 7}};
  }
  std::vector<DType> inside;
};

class Several : public Layer<Several> {
 public:
  explicit Several(Context& context) : Layer(context), many(add<Many>("many")) {}
  Many& many;
};

TEST(DtypeBoundaries, KeepIntegersAndF64AndCastEveryResult) {
  Context context;
  Several model(context);
  model.set_dtype(DType::bf16);
  model.many.set_dtype(DType::f32);
  const Tensor x = filled(context, DType::bf16), loss = Tensor::zeros(context, {}, DType::f64);
  const auto result = model.many(x, ids(context, {1}, {3}), loss);
  EXPECT_THAT(model.many.inside, ElementsAre(DType::f32, DType::i32, DType::f64));
  EXPECT_EQ(result.first.dtype(), DType::bf16);
  EXPECT_EQ(std::get<0>(result.second).dtype(), DType::bf16);
  EXPECT_EQ(std::get<1>(result.second), 7);
  model.many.set_cast_outputs(false);
  EXPECT_EQ(model.many(x, ids(context, {1}, {3}), loss).first.dtype(), DType::f32);
}

TEST(DtypeBoundaries, RejectModulesThatShareParameter) {
  Context context;
  ModelConfig config = preset("gpt-nano");
  const auto model = make_model(context, config);
  model->set_dtype(DType::bf16);
  model->find("lm_head").set_dtype(DType::f32);
  const std::string text = error_of<InvalidUsage>([&] { model->materialize(1); });
  EXPECT_THAT(text, HasSubstr("wte is of bf16, and its parameter wte.weight of f32"));
  EXPECT_THAT(text, HasSubstr("modules that share a parameter need the same dtype"));
  model->find("wte").set_dtype(DType::f32);
  model->materialize(1);
}

TEST(DtypeBoundaries, RejectF64) {
  for (const auto& [whole, inner] : {std::pair(DType::bf16, DType::f64), std::pair(DType::f64, DType::f32)}) {
    Model model(whole, inner);
    EXPECT_THAT(error_of<InvalidUsage>([&] { model.outer.materialize(1); }), HasSubstr("f64 is never cast"));
  }
}

TEST(DtypeBoundaries, LogitsHaveDtypeOfHead) {
  for (const char* name : {"gpt-nano", "llama-nano"})
    for (const std::vector<std::string>& f32_paths :
         {std::vector<std::string>{"lm_head"}, {"wte"}, {"wpe"}, {"wte", "wpe", "lm_head"}, {"h.0", "h.1.ln_1"}}) {
      ModelConfig config = preset(name);
      config.tied = false;
      Context context;
      const auto model = make_model(context, config);
      model->set_dtype(DType::bf16);
      const bool gpt = config.family == ModelConfig::Family::gpt2;
      for (const std::string& path : f32_paths)
        if (gpt || path == "lm_head") model->find(path).set_dtype(DType::f32);
      model->materialize(1);
      Tape tape;
      const TapeScope scope(context, &tape);
      const Tensor tokens = ids(context, {2, 3}, {1, 2, 3, 4, 5, 6});
      const Tensor loss = model->loss(tokens, tokens);
      tape.backward(loss);
      EXPECT_NEAR(loss.item(), 5.5, 0.5) << name << " " << f32_paths[0];
      for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter->gradient().written());
    }
}

/// Error of all gradients together, relative to those of f32.
double gradient_error(const std::vector<std::string>& f32_modules, std::uint64_t seed, DType whole) {
  const auto gradients = [seed](DType dtype, const std::vector<std::string>& f32_paths) {
    Context context;
    const auto model = make_model(context, preset("llama-nano"));
    model->set_dtype(dtype);
    for (const std::string& path : f32_paths) model->find(path).set_dtype(DType::f32);
    model->materialize(seed);
    std::vector<std::int32_t> tokens(4 * 33);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * i * 31 % 256);
    Tape tape;
    const TapeScope scope(context, &tape);
    const auto batch = [&](std::ptrdiff_t first) {
      return ids(context, {4, 32}, std::vector(tokens.begin() + first, tokens.begin() + first + 128));
    };
    tape.backward(model->loss(batch(0), batch(1)));
    std::vector<float> all;
    for (const auto& parameter : model->parameters()) {
      const Tensor g = ops::cast(parameter->gradient().value(), DType::f32);
      all.insert(all.end(), g.data<float>(), g.data<float>() + g.count());
    }
    return all;
  };
  const std::vector<float> exact = gradients(DType::f32, {}), got = gradients(whole, f32_modules);
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - exact[i], 2);
    norm += std::pow(exact[i], 2);
  }
  return std::sqrt(error / norm);
}

/// The mean over several initial values: the errors of one depend on the order of its sums.
double gradient_error(const std::vector<std::string>& f32_modules, DType whole = DType::bf16) {
  constexpr std::uint64_t kSeeds = 12;
  double sum = 0;
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) sum += gradient_error(f32_modules, seed, whole);
  return sum / kSeeds;
}

/// Modules in f32 do not round, forward and backward.
TEST(DtypeBoundaries, F32ModulesImproveGradients) {
  std::vector<std::string> f32_paths = {"model.norm",
                                        "lm_head",
                                        "model.layers.0.input_layernorm",
                                        "model.layers.0.post_attention_layernorm",
                                        "model.layers.1.input_layernorm",
                                        "model.layers.1.post_attention_layernorm"};
  const double all_half = gradient_error({}), norms_and_head = gradient_error(f32_paths);
  EXPECT_LT(norms_and_head, 0.97 * all_half);
  f32_paths.insert(f32_paths.end(), {"model.layers.0", "model.layers.1"});
  const double blocks_too = gradient_error(f32_paths);
  EXPECT_LT(blocks_too, 0.8 * norms_and_head);
  EXPECT_GT(blocks_too, 0);
  EXPECT_EQ(gradient_error({}, DType::f32), 0) << "the control";
}

}  // namespace
}  // namespace tessera::nn::test
