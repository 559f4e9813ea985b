// Models: sizes, names, and training on a tape without an engine.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/init.h"
#include "tessera/nn/models/causal_model.h"
#include "tessera/nn/optimizer.h"
#include "tessera/nn/random.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn {
namespace {

TEST(Models, PresetsHaveStatedSizes) {
  const std::map<std::string, std::int64_t> sizes{
      {"gpt-nano", 120576},   {"gpt-mini", 10844160},   {"gpt2", 124439808}, {"gpt2-xl", 1557611200},
      {"llama-nano", 123712}, {"llama-7b", 6738415616}, {"gpt-tall", 420480}};
  EXPECT_EQ(preset_names().size(), sizes.size());
  Context context;
  for (const std::string& name : preset_names()) {
    EXPECT_EQ(parameter_count(preset(name)), sizes.at(name)) << name;
    const auto model = make_model(context, preset(name));  // without memory: even llama-7b allocates none
    std::int64_t count = 0;
    for (const auto& parameter : model->parameters()) count += parameter->count();
    EXPECT_EQ(count, sizes.at(name)) << name;
  }
  EXPECT_EQ(context.memory_tracker().snapshot().total_peak, 0U);
}

std::vector<std::string> names_and_shapes(const CausalModel& model) {
  std::vector<std::string> out;
  for (const auto& parameter : model.parameters())
    out.push_back(parameter->name() + " " + to_string(parameter->shape()));
  return out;
}

TEST(Models, NamesAndShapesEqualHuggingFace) {
  Context context;
  ModelConfig gpt = preset("gpt-nano");
  gpt.layers = 1;
  EXPECT_EQ(names_and_shapes(*make_model(context, gpt)),
            (std::vector<std::string>{
                "wte.weight [256, 64]", "wpe.weight [64, 64]", "h.0.ln_1.weight [64]", "h.0.ln_1.bias [64]",
                "h.0.attn.c_attn.weight [64, 192]", "h.0.attn.c_attn.bias [192]", "h.0.attn.c_proj.weight [64, 64]",
                "h.0.attn.c_proj.bias [64]", "h.0.ln_2.weight [64]", "h.0.ln_2.bias [64]",
                "h.0.mlp.c_fc.weight [64, 256]", "h.0.mlp.c_fc.bias [256]", "h.0.mlp.c_proj.weight [256, 64]",
                "h.0.mlp.c_proj.bias [64]", "ln_f.weight [64]", "ln_f.bias [64]"}));
  gpt.tied = false;
  EXPECT_EQ(names_and_shapes(*make_model(context, gpt)).back(), "lm_head.weight [256, 64]");
  ModelConfig llama = preset("llama-nano");
  llama.layers = 1;
  EXPECT_EQ(names_and_shapes(*make_model(context, llama)),
            (std::vector<std::string>{
                "model.embed_tokens.weight [256, 64]", "model.layers.0.self_attn.q_proj.weight [64, 64]",
                "model.layers.0.self_attn.k_proj.weight [32, 64]", "model.layers.0.self_attn.v_proj.weight [32, 64]",
                "model.layers.0.self_attn.o_proj.weight [64, 64]", "model.layers.0.mlp.gate_proj.weight [172, 64]",
                "model.layers.0.mlp.up_proj.weight [172, 64]", "model.layers.0.mlp.down_proj.weight [64, 172]",
                "model.layers.0.input_layernorm.weight [64]", "model.layers.0.post_attention_layernorm.weight [64]",
                "model.norm.weight [64]", "lm_head.weight [256, 64]"}));
}

TEST(Models, BlocksAreMarkedAndPathsFound) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  int blocks = 0;
  for (const Module* module : model->modules()) blocks += module->is_block() ? 1 : 0;
  EXPECT_EQ(blocks, 2);
  EXPECT_EQ(model->find("h.1.attn").path(), "h.1.attn");
  EXPECT_EQ(model->find("lm_head").own_parameters().front()->name(), "wte.weight");  // tied
  EXPECT_THROW(model->find("h.2"), InvalidUsage);
}

struct Batch {
  Tensor tokens, targets;
};

/// Sequences that count modulo 17 from different starts: easy to learn.
Batch counting(Context& context, std::int64_t batch, std::int64_t positions) {
  Batch out{Tensor::empty(context, {batch, positions}, DType::i32),
            Tensor::empty(context, {batch, positions}, DType::i32)};
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t t = 0; t < positions; ++t) {
      out.tokens.data<std::int32_t>()[b * positions + t] = static_cast<std::int32_t>((5 * b + t) % 17);
      out.targets.data<std::int32_t>()[b * positions + t] = static_cast<std::int32_t>((5 * b + t + 1) % 17);
    }
  return out;
}

std::vector<double> train(const ModelConfig& config, const ContextOptions& options, int steps) {
  Context context(options);
  const auto model = make_model(context, config);
  model->materialize(0);
  Optimizer optimizer(*model, {});
  const Batch batch = counting(context, 3, 21);
  std::vector<double> losses;
  for (int step = 1; step <= steps; ++step) {
    context.random().step = static_cast<std::uint64_t>(step);
    Tape tape;
    const TapeScope scope(context, &tape);
    const Tensor loss = model->loss(batch.tokens, batch.targets);
    tape.backward(loss);
    optimizer.step(3e-3);
    losses.push_back(loss.item());
  }
  return losses;
}

TEST(Models, GptAndLlamaLearn) {
  for (const char* name : {"gpt-nano", "llama-nano"}) {
    const std::vector<double> losses = train(preset(name), {}, 30);
    EXPECT_NEAR(losses.front(), std::log(256.0), 0.1) << name;  // begins as a guess among 256 tokens
    EXPECT_LT(losses.back(), 0.5) << name;
  }
}

/// Powers of two, which round nothing: scores divided by 2 are those of queries divided by 2.
TEST(Models, GptScalesScoresAsItsConfigSays) {
  const auto loss = [](const ModelConfig& config, int layer, float factor) {
    Context context;
    const auto model = make_model(context, config);
    model->materialize(0);
    for (std::int64_t i = 0; i < config.layers; ++i) {
      if (layer >= 0 && i != layer) continue;
      for (const auto& parameter : model->find("h." + std::to_string(i) + ".attn.c_attn").own_parameters()) {
        auto* const values = parameter->tensor().data<float>();
        for (std::int64_t k = 0; k < parameter->count(); ++k)
          if (k % (3 * config.width) < config.width) values[k] *= factor;
      }
    }
    const Batch batch = counting(context, 2, 9);
    return model->loss(batch.tokens, batch.targets).item();
  };
  ModelConfig usual = preset("gpt-nano");
  usual.heads = usual.kv_heads = usual.width / 16;
  usual.head_dim = 16;
  ModelConfig by_layer = usual, unscaled = usual;
  by_layer.attention_scaled_by_layer = true;
  unscaled.attention_scaled = false;
  EXPECT_EQ(loss(by_layer, -1, 1), loss(usual, 1, 0.5F));
  EXPECT_EQ(loss(unscaled, -1, 1), loss(usual, -1, 4));
  EXPECT_NE(loss(by_layer, -1, 1), loss(usual, -1, 1)) << "the control";
}

TEST(Models, ThreadsAndLazyStreamsAreBitwiseEqual) {
  ModelConfig dropping = preset("gpt-nano");
  dropping.embedding_dropout = dropping.residual_dropout = dropping.attention_dropout = 0.1;
  for (const ModelConfig& config : {preset("gpt-nano"), preset("llama-nano"), dropping}) {
    const std::vector<double> expected = train(config, {}, 4);
    EXPECT_EQ(train(config, {.threads = 2}, 4), expected) << config.name;
    EXPECT_EQ(train(config, {.make_stream = make_lazy_stream}, 4), expected) << config.name;
  }
  EXPECT_NE(train(dropping, {}, 4), train(preset("gpt-nano"), {}, 4));
}

TEST(Models, DropoutIsOffInEvaluation) {
  ModelConfig config = preset("gpt-nano");
  config.residual_dropout = 0.5;
  Context context;
  const auto model = make_model(context, config);
  model->materialize(0);
  const Batch batch = counting(context, 2, 9);
  const auto loss = [&](std::uint64_t step) {
    context.random().step = step;
    return model->loss(batch.tokens, batch.targets).item();
  };
  EXPECT_NE(loss(1), loss(2));
  {
    const EvaluationScope evaluation(context);
    EXPECT_EQ(loss(1), loss(2));
  }
  EXPECT_NE(loss(1), loss(2));
}

TEST(Models, StepReleasesAllMemory) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  model->materialize(0);
  const std::uint64_t before = context.memory_tracker().snapshot().total_now;
  {
    const Batch batch = counting(context, 2, 9);
    Tape tape;
    const TapeScope scope(context, &tape);
    tape.backward(model->loss(batch.tokens, batch.targets));
  }
  for (const auto& parameter : model->parameters()) {
    EXPECT_TRUE(parameter->gradient().written()) << parameter->name();
    parameter->gradient().clear();
  }
  EXPECT_EQ(context.memory_tracker().snapshot().total_now, before);
}

TEST(Models, HooksSurroundForwardAndBackward) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  model->materialize(0);
  std::string story;
  for (Module* module : model->modules()) {
    if (!module->is_block() && !module->path().empty()) continue;
    const std::string name = module->path().empty() ? "root" : module->path();
    module->set_hooks({.pre_forward = [&story, name](Phase) { story += " +" + name; },
                       .post_forward = [&story, name](Phase) { story += " -" + name; },
                       .pre_backward = [&story, name] { story += " <" + name; },
                       .post_backward = [&story, name] { story += " >" + name; }});
  }
  const Batch batch = counting(context, 1, 4);
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(model->loss(batch.tokens, batch.targets));
  EXPECT_EQ(story, " +root +h.0 -h.0 +h.1 -h.1 -root <root <h.1 >h.1 <h.0 >h.0 >root");
}

/// The modules that have parameters but no children, in the order of their forwards.
std::string order_of_forwards(CausalModel& model) {
  std::string order;
  for (Module* module : model.modules())
    if (module->children().empty() && !module->own_parameters().empty())
      module->set_hooks({.pre_forward = [&order, module](Phase) { order += " " + module->path(); },
                         .post_forward = {},
                         .pre_backward = {},
                         .post_backward = {}});
  const Batch batch = counting(model.context(), 1, 4);
  model.loss(batch.tokens, batch.targets);
  return order;
}

// The order in which arguments of one call are evaluated is the compiler's: it must not decide which module runs first,
// and so the order in which gradients are added.
TEST(Models, ForwardsHaveOneOrder) {
  Context context;
  const auto llama = make_model(context, preset("llama-nano"));
  llama->materialize(0);
  const std::string order = order_of_forwards(*llama);
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    std::string projections;
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
      const std::size_t at = order.find(" " + layer + name);
      ASSERT_NE(at, std::string::npos) << name << " in" << order;
      const std::size_t before = projections.empty() ? 0 : order.find(projections);
      EXPECT_LE(before, at) << name << " in" << order;
      projections = " " + layer + name;
    }
  }
  const auto gpt = make_model(context, preset("gpt-nano"));
  gpt->find("wpe").set_dtype(base::DType::bf16);
  gpt->materialize(0);
  EXPECT_EQ(order_of_forwards(*gpt).substr(0, 8), " wte wpe");
}

TEST(Models, HooksMayCallEarlierOnes) {
  Context context;
  const auto model = make_model(context, preset("gpt-nano"));
  std::string story;
  EXPECT_FALSE(model->hooks().pre_forward);
  model->set_hooks({.pre_forward = [&story](Phase) { story += " earlier"; }});
  model->set_hooks({.pre_forward = [&story, earlier = model->hooks().pre_forward](Phase phase) {
    earlier(phase);
    story += " later";
  }});
  model->notify_forward_begins();
  EXPECT_EQ(story, " earlier later");
}

TEST(Init, RangesThatEndBeforeTheyBeginAreRefused) {
  Context context;
  std::vector<float> values(4, 7.0F);
  for (const ElementRange range : {ElementRange{3, 1}, ElementRange{-1, 2}}) {
    const InitialValues drawn{Init::normal(1), "w", 5, range};
    const std::vector<std::function<void()>> calls = {[&] { fill_initial(drawn.init, "w", 5, range, values.data()); },
                                                      [&] { fill_initial(context, drawn, values.data()); },
                                                      [&] { fill_initial(context, drawn, DType::bf16, values.data()); },
                                                      [&] { fill_initial(context, drawn, DType::i32, values.data()); }};
    for (const auto& call : calls)
      EXPECT_EQ(test::error_of<base::InvalidUsage>(call), "fill_initial: elements " + std::to_string(range.begin) +
                                                              " to " + std::to_string(range.end) +
                                                              " of w are no range");
  }
  EXPECT_EQ(values, std::vector<float>(4, 7.0F));
  fill_initial(Init::ones(), "w", 5, {2, 4}, values.data());  // the control
  EXPECT_EQ(values, (std::vector<float>{1, 1, 7, 7}));
}

}  // namespace
}  // namespace tessera::nn
