// Low-rank adapters: their mathematics, names and initial values as in PEFT, and files.
#include "tessera/nn/lora.h"

#include <gmock/gmock.h>

#include <cmath>

#include "tessera/nn/layers/linear.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/nf4.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/peft_adapter.h"
#include "tests/nn/ops/finite_differences.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Tensor parameter_named(Module& model, const std::string& name) {
  for (const auto& parameter : model.parameters())
    if (parameter->name() == name) return parameter->tensor();
  throw std::runtime_error("no parameter " + name);
}

constexpr std::int64_t kIn = 5, kOut = 7, kRank = 2, kRows = 3;
constexpr double kFactor = 0.75;

/// A layer in double with normally distributed values in every parameter.
struct Adapted {
  explicit Adapted(ops::WeightLayout layout) : layer(context, {.in = kIn, .out = kOut, .layout = layout}) {
    layer.add_adapter(kRank, kFactor);
    layer.set_dtype(DType::f64);
    layer.materialize(0);
    for (const auto& parameter : layer.parameters()) {
      const Tensor tensor = parameter->tensor();
      fill_normal({parameter->name(), 3, 0, static_cast<std::uint64_t>(tensor.count())}, 0.0, 1.0,
                  tensor.data<double>());
      inputs.push_back(tensor);
    }
    inputs.push_back(leaf(context, {kRows, kIn}, "x"));
  }
  Context context;
  Linear layer;
  std::vector<Tensor> inputs;  // weight, bias, lora_A, lora_B, x
};

/// y = x W + b + factor (x A^T) B^T by the definition.
std::vector<double> by_definition(const Adapted& a, bool in_out) {
  const auto at = [&](std::size_t which, std::int64_t i) { return a.inputs[which].data<double>()[i]; };
  std::vector<double> y;
  for (std::int64_t n = 0; n < kRows; ++n)
    for (std::int64_t o = 0; o < kOut; ++o) {
      double sum = at(1, o);
      for (std::int64_t i = 0; i < kIn; ++i) sum += at(4, n * kIn + i) * at(0, in_out ? i * kOut + o : o * kIn + i);
      for (std::int64_t r = 0; r < kRank; ++r) {
        double low = 0;
        for (std::int64_t i = 0; i < kIn; ++i) low += at(4, n * kIn + i) * at(2, r * kIn + i);
        sum += kFactor * low * at(3, o * kRank + r);
      }
      y.push_back(sum);
    }
  return y;
}

TEST(Lora, AddsProductOfFactorsAndItsGradients) {
  for (const bool in_out : {false, true}) {
    Adapted a(in_out ? ops::WeightLayout::in_out : ops::WeightLayout::out_in);
    const Tensor y = a.layer(a.inputs[4]);
    const std::vector<double> expected = by_definition(a, in_out);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(y.data<double>()[i], expected[i], 1e-12);
    expect_gradients(
        a.context, [&] { return weighted_sum(a.layer(a.inputs[4])); }, a.inputs, 1e-7);
    expect_gradients(
        a.context, [&] { return weighted_sum(a.layer(a.inputs[4], ops::Activation::gelu_tanh)); }, a.inputs, 1e-7);
  }
}

TEST(Lora, StartsAtModelAndTrainsAdaptersOnly) {
  for (const char* name : {"gpt-nano", "llama-nano"}) {
    const ModelConfig config = preset(name);
    Context context;
    const auto plain = make_model(context, config), adapted = make_model(context, config);
    const LoraOptions options{.rank = 4, .alpha = 8, .targets = default_lora_targets(config)};
    EXPECT_EQ(add_lora(*adapted, options), static_cast<int>(2 * options.targets.size()));
    for (CausalModel* model : {plain.get(), adapted.get()}) model->materialize(1);
    const Tensor tokens = ids(context, {1, 4}, {1, 2, 3, 4});
    EXPECT_EQ(plain->loss(tokens, tokens).item(), adapted->loss(tokens, tokens).item()) << "B is zero";
    Tape tape;
    {
      const TapeScope scope(context, &tape);
      tape.backward(adapted->loss(tokens, tokens));
    }
    for (const auto& parameter : adapted->parameters()) {
      EXPECT_EQ(parameter->gradient().written(), is_adapter(parameter->name())) << parameter->name();
      EXPECT_EQ(parameter->tensor().requires_grad(), is_adapter(parameter->name()));
    }
  }
}

TEST(Lora, NamesShapesAndInitialValuesEqualPeft) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  add_lora(*model, {.rank = 4, .alpha = 8, .targets = {"c_attn"}});
  model->materialize(0);
  const Tensor a = parameter_named(*model, "h.1.attn.c_attn.lora_A.weight");
  const Tensor b = parameter_named(*model, "h.1.attn.c_attn.lora_B.weight");
  EXPECT_THAT(a.shape(), ElementsAre(4, 64));
  EXPECT_THAT(b.shape(), ElementsAre(192, 4));
  // kaiming_uniform_ with a = sqrt(5): below sqrt(6 / (1 + 5) / in), so a variance of 1 / (3 in).
  double most = 0, squares = 0;
  for (std::int64_t i = 0; i < a.count(); ++i) {
    most = std::max(most, std::abs(static_cast<double>(a.data<float>()[i])));
    squares += std::pow(a.data<float>()[i], 2);
  }
  EXPECT_LE(most, 1.0 / 8);
  EXPECT_GT(most, 0.95 / 8);
  EXPECT_NEAR(squares / static_cast<double>(a.count()), 1.0 / (3 * 64), 0.15 / (3 * 64));
  for (std::int64_t i = 0; i < b.count(); ++i) EXPECT_EQ(b.data<float>()[i], 0.0F);
}

TEST(Lora, RejectsInvalidOptions) {
  Context context;
  const auto refuses = [&](const LoraOptions& options) {
    const auto model = make_model(context, preset("gpt-nano"));
    return error_of<InvalidUsage>([&] { add_lora(*model, options); });
  };
  EXPECT_THAT(refuses({.rank = 0, .targets = {"c_attn"}}), HasSubstr("rank 0"));
  EXPECT_THAT(refuses({.alpha = 0, .targets = {"c_attn"}}), HasSubstr("above 0"));
  EXPECT_THAT(refuses({}), HasSubstr("no targets"));
  EXPECT_THAT(refuses({.targets = {"c_attn", "attn"}}), HasSubstr("'attn' matches no linear layer"));
  EXPECT_THAT(refuses({.targets = {"_attn"}}), HasSubstr("'_attn'")) << "whole parts of a name";
  EXPECT_EQ(refuses({.targets = {"mlp.c_fc", "h.1.attn.c_proj"}}), "");
  const auto model = make_model(context, preset("gpt-nano"));
  add_lora(*model, {.targets = {"c_attn"}});
  EXPECT_THAT(error_of<InvalidUsage>([&] { add_lora(*model, {.targets = {"c_attn"}}); }), HasSubstr("already has one"));
}

/// A quantized layer with adapters in double, and the dense weight that its bytes decode to.
TEST(Lora, OnQuantizedWeightEqualsLoraOnDecodedWeight) {
  for (const bool in_out : {false, true}) {
    Context context;
    const auto layout = in_out ? ops::WeightLayout::in_out : ops::WeightLayout::out_in;
    Linear layer(context, {.in = kIn, .out = kOut, .layout = layout});
    layer.quantize();
    layer.add_adapter(kRank, kFactor);
    layer.set_dtype(DType::f64);
    layer.materialize(0);
    const Tensor weight = layer.weight().tensor();
    EXPECT_EQ(weight.dtype(), DType::u8);
    EXPECT_EQ(weight.count(), static_cast<std::int64_t>(nf4_bytes(kIn * kOut)));
    std::vector<float> values(kIn * kOut);
    fill_normal({"w", 3, 0, values.size()}, 0.0F, 1.0F, values.data());
    const std::span bytes(static_cast<std::byte*>(weight.raw()), nf4_bytes(kIn * kOut));
    encode_nf4(values, bytes);
    decode_nf4(bytes, kIn * kOut, {0, kIn * kOut}, values.data());
    Tensor dense = Tensor::empty(context, layer.weight_shape(), DType::f64);
    std::copy(values.begin(), values.end(), dense.data<double>());

    const Tensor x = leaf(context, {kRows, kIn}, "x");
    std::vector<Tensor> trained = {x};
    for (const auto& parameter : layer.parameters())
      if (is_adapter("l." + parameter->name())) trained.push_back(parameter->tensor());
    ASSERT_EQ(trained.size(), 3U);
    const Tensor bias = layer.own_parameters().at(1)->tensor();
    const auto by_hand = [&](const Tensor& from) {
      const Tensor low = ops::linear(ops::linear(from, trained[1]), trained[2]);
      return ops::add(ops::linear(from, dense, bias, layout), ops::scale(low, kFactor));
    };
    const Tensor y = layer(x), expected = by_hand(x);
    for (std::int64_t i = 0; i < y.count(); ++i) EXPECT_EQ(y.data<double>()[i], expected.data<double>()[i]);
    expect_gradients(
        context, [&] { return weighted_sum(layer(x)); }, trained, 1e-7);
    expect_gradients(
        context, [&] { return weighted_sum(layer(x, ops::Activation::relu)); }, trained, 1e-7);
    bytes[nf4_bytes(kIn * kOut) - 2] ^= std::byte{0x17};  // the control: other codes
    const Tensor other = layer(x);
    EXPECT_FALSE(std::equal(y.data<double>(), y.data<double>() + y.count(), other.data<double>()));
  }
}

TEST(Lora, QuantizedModelHoldsLinearWeightsAsBytes) {
  Context context;
  const auto model = make_model(context, preset("llama-nano"));
  EXPECT_EQ(quantize_nf4(*model), 2 * 7);
  model->set_dtype(DType::bf16);
  for (const auto& parameter : model->parameters())
    EXPECT_EQ(parameter->dtype() == DType::u8, parameter->name().find("_proj") != std::string::npos);
  EXPECT_THAT(error_of<InvalidUsage>([&] { quantize_nf4(*model); }), HasSubstr("already quantized"));
}

// --- merging and files

/// Error of the adapted layer in f32 against one with the merged weight.
double merged_error(bool in_out, bool merge) {
  ModelConfig config = preset(in_out ? "gpt-nano" : "llama-nano");
  const LoraOptions options{.rank = kRank, .alpha = kFactor * kRank, .targets = {"any"}};
  Context context;
  const auto layout = in_out ? ops::WeightLayout::in_out : ops::WeightLayout::out_in;
  Linear layer(context, {.in = kIn, .out = kOut, .bias = false, .layout = layout});
  layer.add_adapter(kRank, options.factor());
  layer.materialize(0);
  LoraMerger merging(config, options);
  for (const auto& parameter : layer.parameters()) {
    const Tensor tensor = parameter->tensor();
    fill_normal({parameter->name(), 3, 0, static_cast<std::uint64_t>(tensor.count())}, 0.0F, 1.0F,
                tensor.data<float>());
    if (is_adapter("layer." + parameter->name()))
      merging.add("layer." + parameter->name(), tensor.shape(),
                  {tensor.data<float>(), static_cast<std::size_t>(tensor.count())});
  }
  Tensor x = leaf(context, {kRows, kIn}, "x", DType::f32);
  const Tensor expected = layer(x);
  const Tensor weight = layer.weight().tensor();
  if (merge)  // in ranges that begin anywhere
    for (std::int64_t begin = 0; begin < weight.count(); begin += 4)
      merging.merge("layer.weight", {begin, std::min(begin + 4, weight.count())}, weight.data<float>() + begin);
  const Tensor y = ops::linear(x, weight, {}, layout);
  double error = 0;
  for (std::int64_t i = 0; i < y.count(); ++i)
    error = std::max(error, std::abs(static_cast<double>(y.data<float>()[i]) - expected.data<float>()[i]));
  return error;
}

TEST(Lora, MergedWeightsEqualAdaptedModel) {
  for (const bool in_out : {false, true}) {
    EXPECT_LT(merged_error(in_out, true), 1e-5);
    EXPECT_GT(merged_error(in_out, false), 0.1) << "the control";
  }
}

TEST(AdapterFiles, ReadBackAndHavePeftKeys) {
  const TemporaryDirectory directory;
  const ModelConfig config = preset("gpt-nano");
  const LoraOptions options{.rank = 1, .alpha = 2.5, .targets = {"c_attn"}};
  const std::string a = "h.0.attn.c_attn.lora_A.weight", b = "h.0.attn.c_attn.lora_B.weight";
  const std::vector<SafetensorsTensor> tensors = {{a, {1, 3}}, {b, {2, 1}}};
  const float values[] = {1, -2, 3, 4, 5};
  PeftAdapterWriter writer(directory.path("x"), lora_json(options, config, "gpt2"), config, tensors);
  writer.write(a, {0, 3}, values);
  writer.write(b, {0, 2}, values + 3);
  writer.commit();
  EXPECT_NE(SafetensorsFile(directory.path("x/adapter_model.safetensors"))
                .find("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"),
            nullptr);
  const PeftAdapterReader read(directory.path("x"));
  EXPECT_EQ(read.options(), options);
  read.check(tensors);
  float out[2] = {};
  read.read(a, {1, 3}, out);
  EXPECT_THAT(out, ElementsAre(-2, 3));
  EXPECT_THAT(error_of<InvalidUsage>([&] { read.check({{a, {1, 3}}}); }), HasSubstr("lora_B.weight' is unexpected"));
  EXPECT_THAT(error_of<InvalidUsage>([&] {
                read.check({{a, {1, 4}}, {b, {2, 1}}});
              }),
              HasSubstr("has shape [1, 3], needs [1, 4]"));
  EXPECT_THAT(error_of<InvalidUsage>([&] {
                read.check({{a, {1, 3}}, {b, {2, 1}}, {"c", {1}}});
              }),
              HasSubstr("'c' is missing"));
}

TEST(AdapterFiles, RankStabilizedScaleAndWholeNames) {
  const LoraOptions options = parse_lora(
      R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": true, "target_modules": ["transformer.h.1.mlp.c_fc"]})",
      "a");
  EXPECT_EQ(options.factor(), 4);
  EXPECT_EQ(parse_lora(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["c_fc"]})", "a").factor(),
            2);
  EXPECT_EQ(parse_lora(lora_json(options, preset("gpt-nano"), "b"), "a"), options);
  Context context;
  EXPECT_EQ(add_lora(*make_model(context, preset("gpt-nano")), options), 1);
}

TEST(AdapterFiles, RejectOtherThanPlainLora) {
  const auto parse = [](const std::string& more) {
    return error_of<InvalidUsage>([&] {
      parse_lora(
          R"({"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj"])" + more + "}",
          "a");
    });
  };
  EXPECT_EQ(parse(R"(, "lora_dropout": 0.1, "modules_to_save": null, "rank_pattern": {}, "use_dora": false)"), "");
  for (const char* plain : {"true", "false", "null", "\"gaussian\"", "\"eva\"", "\"orthogonal\"", "\"lora_ga\""})
    EXPECT_EQ(parse(std::string(R"(, "init_lora_weights": )") + plain), "") << plain;
  for (const char* changing : {"pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "mica", "new"})
    EXPECT_THAT(parse(std::string(R"(, "init_lora_weights": ")") + changing + '"'),
                HasSubstr(std::string("'init_lora_weights: ") + changing + "' is not supported"));
  EXPECT_THAT(parse(R"(, "alora_invocation_tokens": [17, 18])"), HasSubstr("'alora_invocation_tokens: [17,18]'"));
  EXPECT_THAT(parse(R"(, "layer_replication": [[0, 1], [0, 1]])"), HasSubstr("'layer_replication: "));
  // Of a later PEFT: what is set may have an effect.
  EXPECT_THAT(parse(R"(, "use_something": true)"), HasSubstr("'use_something: true' is not supported"));
  EXPECT_EQ(parse(R"(, "use_something": null, "another": false, "third": [], "fourth": {})"), "") << "the control";
  EXPECT_THAT(parse(R"(, "use_dora": true)"), HasSubstr("a: 'use_dora: true' is not supported"));
  EXPECT_THAT(parse(R"(, "bias": "all")"), HasSubstr("bias"));
  EXPECT_THAT(parse(R"(, "modules_to_save": ["wte"])"), HasSubstr("modules_to_save"));
  EXPECT_THAT(parse(R"(, "rank_pattern": {"q_proj": 2})"), HasSubstr("rank_pattern"));
  EXPECT_THAT(error_of<InvalidUsage>([] { parse_lora(R"({"peft_type": "IA3"})", "a"); }), HasSubstr("peft_type 'IA3'"));
  EXPECT_THAT(error_of<InvalidUsage>(
                  [] { parse_lora(R"({"peft_type": "LORA", "r": 4, "target_modules": "all-linear"})", "a"); }),
              HasSubstr("'target_modules' must be a list"));
  EXPECT_THAT(error_of<InvalidUsage>([] { parse_lora("[]", "a"); }), HasSubstr("not a JSON object"));
}

}  // namespace
}  // namespace tessera::nn::test
