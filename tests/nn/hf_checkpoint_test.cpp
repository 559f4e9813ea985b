// config.json, and folders in the format of transformers.
#include "tessera/nn/hf_checkpoint.h"

#include <gmock/gmock.h>

#include <set>

#include "tessera/base/file.h"
#include "tessera/nn/models/causal_model.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;

std::string refused(const std::string& json) {
  return error_of<InvalidUsage>([&] { parse_config(json, "config.json"); });
}

TEST(Config, ReadsWhatItWrites) {
  for (const std::string& name : preset_names()) {
    ModelConfig config = preset(name);
    config.residual_dropout = config.family == ModelConfig::Family::gpt2 ? 0.125 : 0.0;
    EXPECT_TRUE(config.same_model(parse_config(config_json(config), "config.json"))) << config_json(config);
  }
  ModelConfig scaled = preset("gpt-nano");
  scaled.attention_scaled = false;
  scaled.attention_scaled_by_layer = true;
  EXPECT_TRUE(scaled.same_model(parse_config(config_json(scaled), "config.json"))) << config_json(scaled);
  ModelConfig all = preset("llama-nano");
  all.attention_bias = all.output_bias = all.mlp_bias = true;
  all.rope_scaling = {.factor = 8, .low = 1, .high = 4, .original_context = 32};
  EXPECT_TRUE(all.same_model(parse_config(config_json(all), "config.json"))) << config_json(all);
  EXPECT_FALSE(all.same_model(preset("llama-nano"))) << "the control";
  all.output_bias = all.mlp_bias = false;  // qwen2
  all.rope_scaling = {.factor = 2};
  EXPECT_TRUE(all.same_model(parse_config(config_json(all), "config.json"))) << config_json(all);
}

TEST(Config, ReadsTransformers4And5) {
  const std::string llama =
      R"({"model_type":"llama","hidden_size":64,"intermediate_size":172,"num_attention_heads":4,)";
  EXPECT_EQ(parse_config(llama + R"("rope_theta":500000.0,"rope_scaling":null})", "4").rope_theta, 500000.0);
  EXPECT_EQ(parse_config(llama + R"("rope_parameters":{"rope_theta":5e5,"rope_type":"default"}})", "5").rope_theta,
            500000.0);
  const ModelConfig config = parse_config(llama + R"("num_key_value_heads":null,"head_dim":null})", "nulls");
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tied);
  const ModelConfig gpt =
      parse_config(R"({"model_type":"gpt2","n_embd":32,"n_head":2,"n_inner":null,"activation_function":"relu"})", "g");
  EXPECT_EQ(gpt.hidden, 128);
  EXPECT_EQ(gpt.vocabulary, 50257);
  EXPECT_EQ(gpt.activation, kernels::Activation::relu);
  EXPECT_EQ(gpt.residual_dropout, 0.1);  // transformers' default
}

/// transformers 5 gives fields of gpt2 two names, of which the general one goes first.
TEST(Config, Gpt2HasTwoNamesOfAField) {
  const auto parse = [](const std::string& more) { return parse_config(R"({"model_type":"gpt2")" + more + "}", "g"); };
  const ModelConfig named = parse(
      R"(,"hidden_size":48,"num_hidden_layers":3,"num_attention_heads":4,"max_position_embeddings":64,"n_layer":5)");
  EXPECT_EQ(std::vector({named.width, named.layers, named.heads, named.context, named.hidden}),
            (std::vector<std::int64_t>{48, 3, 4, 64, 192}));
  EXPECT_EQ(parse(R"(,"n_layer":5)").layers, 5) << "the control";
}

TEST(Config, RopeIsAsInTransformers5) {
  const auto parse = [](const std::string& more) {
    return parse_config(
        R"({"model_type":"llama","hidden_size":64,"num_attention_heads":4,"max_position_embeddings":96)" + more + "}",
        "l");
  };
  for (const char* linear :
       {R"(,"rope_scaling":{"type":"linear","factor":4.0})", R"(,"rope_scaling":{"rope_type":"linear","factor":4})",
        R"(,"rope_parameters":{"type":"linear","factor":4,"rope_theta":10000.0})"})
    EXPECT_EQ(parse(linear).rope_scaling, (kernels::RopeScaling{.factor = 4})) << linear;
  const std::string llama3 = R"(,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1)";
  EXPECT_EQ(parse(llama3 + R"(,"high_freq_factor":4})").rope_scaling,
            (kernels::RopeScaling{.factor = 8, .low = 1, .high = 4, .original_context = 96}));
  EXPECT_THAT(error_of<InvalidUsage>([&] { parse(llama3 + "}"); }), HasSubstr("needs 'high_freq_factor'"));
  // Theta lies in one of three places; a rope_scaling replaces rope_parameters.
  const std::string outside = R"(,"rope_theta":7)", none = "";
  for (const std::string& theta : {none, outside}) {
    EXPECT_EQ(parse(theta).rope_theta, theta.empty() ? 10000.0 : 7.0);
    for (const char* field : {"rope_scaling", "rope_parameters"}) {
      const ModelConfig inside = parse(theta + ",\"" + field + R"(":{"rope_type":"default","rope_theta":5})");
      EXPECT_EQ(inside.rope_theta, 5.0) << field;
      EXPECT_THAT(inside.note, HasSubstr("transformers 4 would ignore")) << field;
    }
  }
  EXPECT_EQ(parse(R"(,"rope_parameters":{"rope_theta":5},"rope_scaling":{"type":"linear","factor":2})").rope_theta,
            10000.0);
  EXPECT_EQ(parse(R"(,"rope_theta":5,"rope_parameters":{"rope_theta":5})").note, "") << "the control";
}

TEST(Config, TypesLikeLlamaHaveTheirOwnDefaults) {
  const ModelConfig mistral = parse_config(R"({"model_type":"mistral","sliding_window":null})", "m");
  EXPECT_EQ(parameter_count(mistral), 7241732096);
  EXPECT_EQ(parse_config(R"({"model_type":"mistral","max_position_embeddings":4096})", "m").kv_heads, 8);
  EXPECT_THAT(refused(R"({"model_type":"mistral"})"), HasSubstr("'sliding_window' of 4096 below"));
  const std::string qwen =
      R"({"model_type":"qwen2","hidden_size":896,"intermediate_size":4864,"num_attention_heads":14,)"
      R"("num_hidden_layers":24,"num_key_value_heads":2,"tie_word_embeddings":true)";
  EXPECT_EQ(parameter_count(parse_config(qwen + "}", "q")), 494032768);
  EXPECT_THAT(refused(qwen + R"(,"use_sliding_window":true})"), HasSubstr("'sliding_window'"));
}

/// Python writes and reads numbers that JSON lacks. They matter only where a number is needed.
TEST(Config, InfinityAndNanAreRead) {
  const std::string gpt = R"({"model_type":"gpt2","n_layer":3,"other":[0.0,Infinity,-Infinity,NaN],"NaN":"a \" NaN",)";
  EXPECT_EQ(parse_config(gpt + R"("n_head":4})", "g").layers, 3);
  EXPECT_THAT(refused(gpt + R"("layer_norm_epsilon":NaN})"),
              HasSubstr("'layer_norm_epsilon' is \"NaN\", needs a number"));
  EXPECT_THAT(refused(gpt + R"("n_head":Infinit})"), HasSubstr("is not JSON: line 1"));
}

TEST(Config, NamesUnsupportedFields) {
  const std::string gpt = R"({"model_type":"gpt2",)", llama = R"({"model_type":"llama",)";
  EXPECT_THAT(refused("{"), HasSubstr("is not JSON: line 1, column 2"));
  EXPECT_THAT(refused("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refused(std::string(5000, '[')), HasSubstr("is nested more than 64 deep"));
  EXPECT_THAT(refused(gpt + R"("n_head":4,"n_head":4})"), HasSubstr("has the key \"n_head\" twice"));
  EXPECT_THAT(refused("{}"), HasSubstr("model_type"));
  EXPECT_THAT(refused(R"({"model_type":"bert"})"), HasSubstr("'bert'"));
  EXPECT_THAT(refused(gpt + R"("n_embd":"x"})"), HasSubstr("'n_embd'"));
  EXPECT_THAT(refused(gpt + R"("n_embd":-5})"), HasSubstr("needs 1 or more"));
  for (const char* const beyond :
       {"9223372036854775807", "-9223372036854775808", "4611686018427387904", "1099511627777"})
    EXPECT_THAT(
        refused(gpt + R"("n_embd":)" + beyond + "}"),
        AllOf(HasSubstr("config.json: 'n_embd' is "), HasSubstr("needs a whole number between -2^40 and 2^40")));
  EXPECT_THAT(refused(gpt + R"("n_head":5})"), HasSubstr("5 heads"));
  EXPECT_THAT(refused(gpt + R"("resid_pdrop":1.5})"), HasSubstr("dropout"));
  EXPECT_THAT(refused(gpt + R"("activation_function":"mish"})"),
              HasSubstr("'activation_function: mish' is not supported"));
  EXPECT_THAT(refused(llama + R"("hidden_act":"gelu"})"), HasSubstr("'hidden_act: gelu' is not supported"));
  EXPECT_THAT(refused(gpt + R"("add_cross_attention":true})"), HasSubstr("add_cross_attention"));
  for (const std::string& model : {gpt, llama})
    EXPECT_THAT(refused(model + R"("is_causal":false})"), HasSubstr("is_causal"));
  EXPECT_THAT(refused(llama + R"("transformers_weights":"other.safetensors"})"), HasSubstr("transformers_weights"));
  EXPECT_THAT(refused(gpt + R"("eos_token_id":{}})"), HasSubstr("'eos_token_id' must be an id"));
  EXPECT_THAT(refused(gpt + R"("pad_token_id":[1,"x"]})"), HasSubstr("'pad_token_id' must be an id"));
  EXPECT_THAT(refused(llama + R"("rope_scaling":{"type":"yarn","factor":2}})"), HasSubstr("'yarn'"));
  EXPECT_THAT(refused(llama + R"("rope_scaling":{"type":"linear"}})"), HasSubstr("'factor'"));
  EXPECT_THAT(refused(llama + R"("rope_parameters":{"full_attention":{"rope_theta":1}}})"),
              HasSubstr("'full_attention: "));
  EXPECT_THAT(refused(llama + R"("partial_rotary_factor":0.5})"), HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(refused(llama + R"("quantization_config":{"bits":4}})"), HasSubstr("quantization_config"));
  EXPECT_THAT(refused(llama + R"("num_key_value_heads":5})"), HasSubstr("5 key heads"));
  EXPECT_THAT(error_of<InvalidUsage>([] { find_config("gpt-5"); }), HasSubstr("gpt-nano gpt-mini gpt2"));
  EXPECT_THAT(error_of<InvalidUsage>([] { find_config("none.json"); }), HasSubstr("none.json"));
}

/// As transformers 5 has it: the length outside of the scaling counts.
TEST(HfConfig, OriginalLengthOutsideCounts) {
  const std::string scaling = R"("rope_type":"llama3","factor":2,"low_freq_factor":1,"high_freq_factor":4,)"
                              R"("original_max_position_embeddings":32)";
  const auto read = [&](const std::string& outside, const std::string& field) {
    return parse_config(R"({"model_type":"llama","num_hidden_layers":1,"hidden_size":32,"num_attention_heads":4,)" +
                            outside + "\"" + field + "\":{" + scaling + "}}",
                        "config.json");
  };
  for (const char* field : {"rope_scaling", "rope_parameters"}) {
    EXPECT_EQ(read("", field).rope_scaling.original_context, 32) << field;
    const ModelConfig outside = read(R"("original_max_position_embeddings":16,)", field);
    EXPECT_EQ(outside.rope_scaling.original_context, 16) << field;
    EXPECT_NE(outside.note, "") << field;  // transformers 4 differs
  }
}

TEST(HfConfig, IsFoundByFileAndFolder) {
  const TemporaryDirectory folder;
  EXPECT_THAT(error_of<InvalidUsage>([&] { find_config(folder.path()); }), HasSubstr("config.json"));
  const std::string file = folder.write("config.json", config_json(preset("llama-nano")));
  EXPECT_EQ(find_config(file).width, preset("llama-nano").width);
  EXPECT_EQ(find_config(folder.path()).family, preset("llama-nano").family);
  // A preset comes before a folder of its name.
  std::filesystem::create_directory(folder.path("gpt-nano"));
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  EXPECT_EQ(find_config("gpt-nano").family, preset("gpt-nano").family);
  std::filesystem::current_path(before);
}

std::vector<SafetensorsTensor> tensors_of(const CausalModel& model, const std::string& prefix = "") {
  std::vector<SafetensorsTensor> out;
  for (const auto& parameter : model.parameters()) out.push_back({prefix + parameter->name(), parameter->shape()});
  return out;
}

class HfCheckpoints : public testing::Test {
 protected:
  const TemporaryDirectory directory_;
  Context context_;
  ModelConfig config_ = preset("gpt-nano");
  std::unique_ptr<CausalModel> model_ = make_model(context_, config_);
  std::string model_file_ = directory_.path("model.safetensors");

  void SetUp() override { model_->materialize(1); }
  void write_config() const { directory_.write("config.json", config_json(config_)); }
  /// Writes all of the model under names with `prefix`, and the tensors `more`, filled with zeros.
  void write_tensors(const std::string& path, const std::string& prefix,
                     const std::vector<SafetensorsTensor>& more = {}) const {
    std::vector<SafetensorsTensor> all = tensors_of(*model_, prefix);
    all.insert(all.end(), more.begin(), more.end());
    SafetensorsWriter writer(path, all, {});
    for (const auto& parameter : model_->parameters())
      writer.write(prefix + parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
    for (const SafetensorsTensor& tensor : more) {
      const std::vector<float> zeros(static_cast<std::size_t>(count_of(tensor.shape)));
      writer.write(tensor.name, {0, count_of(tensor.shape)}, zeros.data());
    }
    writer.commit();
  }
  void expect_same(const HfCheckpointReader& opened) const {
    opened.check(tensors_of(*model_));
    for (const auto& parameter : model_->parameters()) {
      const float* values = parameter->tensor().data<float>();
      const ElementRange middle{parameter->count() / 3, parameter->count()};
      std::vector<float> out(static_cast<std::size_t>(middle.count()));
      opened.read(parameter->name(), middle, out.data());
      EXPECT_TRUE(std::equal(out.begin(), out.end(), values + middle.begin)) << parameter->name();
    }
  }
};

/// What transformers 5 does with a head that config.json ties to the embedding.
TEST_F(HfCheckpoints, TiedHeadIsAsInTransformers5) {
  write_config();
  const std::vector<float> other(static_cast<std::size_t>(256 * 64), 3.0F);
  const auto write = [&](bool embedding, const Shape& head, const float* values) {
    std::vector<SafetensorsTensor> all = tensors_of(*model_);
    std::erase_if(all, [&](const SafetensorsTensor& tensor) { return !embedding && tensor.name == "wte.weight"; });
    all.push_back({"lm_head.weight", head});
    SafetensorsWriter writer(model_file_, all, {});
    for (const auto& parameter : model_->parameters())
      if (embedding || parameter->name() != "wte.weight")
        writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
    writer.write("lm_head.weight", {0, count_of(head)}, values);
    writer.commit();
    return HfCheckpointReader(directory_.path());
  };
  const float* const embedding = model_->parameters()[0]->tensor().data<float>();
  ASSERT_EQ(model_->parameters()[0]->name(), "wte.weight");
  {  // equal: one parameter
    const HfCheckpointReader read = write(true, {256, 64}, embedding);
    EXPECT_TRUE(read.config().tied);
    EXPECT_EQ(read.config().note, "");
    expect_same(read);
  }
  {  // alone: it is also the embedding
    const HfCheckpointReader read = write(false, {256, 64}, embedding);
    EXPECT_THAT(read.config().note, HasSubstr("lm_head.weight is used for the missing wte.weight"));
    expect_same(read);
  }
  {  // another: not tied
    const HfCheckpointReader read = write(true, {256, 64}, other.data());
    EXPECT_FALSE(read.config().tied);
    EXPECT_THAT(read.config().note, HasSubstr("lm_head.weight differs from wte.weight"));
    float value = 0;
    read.read("lm_head.weight", {5, 6}, &value);
    EXPECT_EQ(value, 3.0F);
  }
  EXPECT_THAT(error_of<InvalidUsage>([&] {
                write(true, {255, 64}, other.data());
              }),
              HasSubstr("'tie_word_embeddings'"));
}

/// An export replaces the files of an earlier one that readers would prefer, and has the files of the tokenizer.
TEST_F(HfCheckpoints, ExportLeavesNoOtherWeightsAndKeepsCompanions) {
  const std::string out = directory_.path("out");
  std::filesystem::create_directories(out);
  for (const char* name : {"model-1.safetensors", "model-2.safetensors", "other.safetensors", "notes.txt"})
    directory_.write(std::string("out/") + name, "old");
  directory_.write("out/model.safetensors.index.json",
                   R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  directory_.write("tokenizer.json", "{}");
  directory_.write("generation_config.json", R"({"eos_token_id":[2,7]})");
  directory_.write("config.json", R"({"model_type":"gpt2","eos_token_id":[2,7],"pad_token_id":0})");
  config_.token_ids = read_config(directory_.path("config.json")).token_ids;
  config_.tied = false;
  const auto untied = make_model(context_, config_);
  untied->materialize(1);
  HfCheckpointWriter writer(out, config_, tensors_of(*untied), directory_.path());
  for (const auto& parameter : untied->parameters())
    writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
  EXPECT_TRUE(std::filesystem::exists(out + "/model.safetensors.index.json")) << "before it is complete";
  writer.commit();
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(out)) files.insert(entry.path().filename());
  EXPECT_THAT(files, testing::UnorderedElementsAre("config.json", "model.safetensors", "other.safetensors", "notes.txt",
                                                   "tokenizer.json", "generation_config.json"));
  const std::string json = base::read_regular(out + "/config.json").text;
  EXPECT_THAT(json, HasSubstr("\"pad_token_id\": 0"));
  EXPECT_THAT(json, Not(HasSubstr("bos_token_id"))) << "the default of its class remains";
  // Without the prefix, transformers 4 refuses a gpt2 with a head of its own.
  const SafetensorsFile file(out + "/model.safetensors");
  EXPECT_NE(file.find("transformer.wte.weight"), nullptr);
  EXPECT_NE(file.find("lm_head.weight"), nullptr);
  HfCheckpointReader(out).check(tensors_of(*untied));
}

TEST_F(HfCheckpoints, ReadTheirExport) {
  HfCheckpointWriter writer(directory_.path("out/deep"), config_, tensors_of(*model_));
  for (const auto& parameter : model_->parameters())
    writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
  writer.commit();
  const HfCheckpointReader opened(directory_.path("out/deep"));
  EXPECT_TRUE(config_.same_model(opened.config()));
  expect_same(opened);
}

/// A save that fails leaves the whole previous one, also if it is of another model.
TEST_F(HfCheckpoints, KeepPreviousOneIfModelCannotBeReplaced) {
  const std::string out = directory_.path("out"), before = "{\"of\": \"another model\"}";
  std::filesystem::create_directories(out);
  directory_.write("out/config.json", before);
  std::filesystem::create_directories(out + "/model.safetensors/not_empty");
  {
    HfCheckpointWriter writer(out, config_, tensors_of(*model_));
    for (const auto& parameter : model_->parameters())
      writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
    EXPECT_NE(error_of<base::SystemError>([&] { writer.commit(); }), "");
  }
  std::string after;
  std::getline(std::ifstream(out + "/config.json"), after);
  EXPECT_EQ(after, before);
  std::filesystem::remove_all(out + "/model.safetensors");
  std::filesystem::remove(out + "/config.json");
  EXPECT_TRUE(std::filesystem::is_empty(out)) << "other files are left";
}

TEST_F(HfCheckpoints, AcceptPrefixesBuffersAndTiedHead) {
  write_config();
  write_tensors(model_file_, "transformer.",
                {{"transformer.h.0.attn.bias", {1, 1, 4, 4}}, {"h.1.attn.masked_bias", {}}, {"scaled_fp8", {0}}});
  expect_same(HfCheckpointReader(directory_.path()));
}

TEST_F(HfCheckpoints, LlamaNeedsNoPrefix) {
  config_ = preset("llama-nano");
  model_ = make_model(context_, config_);
  model_->materialize(1);
  write_config();
  SafetensorsWriter writer(model_file_,
                           [&] {
                             std::vector<SafetensorsTensor> all = tensors_of(*model_);
                             for (SafetensorsTensor& tensor : all)
                               if (tensor.name.starts_with("model.")) tensor.name = tensor.name.substr(6);
                             all.push_back({"layers.0.self_attn.rotary_emb.cos_cached", {1, 1, 4, 4}, DType::u8});
                             return all;
                           }(),
                           {});
  for (const auto& parameter : model_->parameters())
    writer.write(parameter->name().starts_with("model.") ? parameter->name().substr(6) : parameter->name(),
                 {0, parameter->count()}, parameter->tensor().data<float>());
  writer.write_whole("layers.0.self_attn.rotary_emb.cos_cached", std::vector<std::byte>(16));
  writer.commit();
  expect_same(HfCheckpointReader(directory_.path()));
}

TEST_F(HfCheckpoints, ReadIndexOfSeveralFiles) {
  write_config();
  write_tensors(directory_.path("part-1.safetensors"), "");
  directory_.write("model.safetensors.index.json", R"({"weight_map":{"wte.weight":"part-1.safetensors"}})");
  expect_same(HfCheckpointReader(directory_.path()));
  for (const char* bad : {R"({"weight_map":{"wte.weight":"../part-1.safetensors"}})",
                          R"({"weight_map":{"a":"none.safetensors"}})", R"({"weight_map":{"a":1}})", R"({})", "[[[["}) {
    directory_.write("model.safetensors.index.json", bad);
    EXPECT_THROW(HfCheckpointReader(directory_.path()), InvalidUsage) << bad;
  }
}

TEST_F(HfCheckpoints, NameMismatches) {
  EXPECT_THAT(error_of<InvalidUsage>([&] { HfCheckpointReader(directory_.path()); }), HasSubstr("config.json"));
  write_config();
  EXPECT_THAT(error_of<InvalidUsage>([&] { HfCheckpointReader(directory_.path()); }), HasSubstr("neither"));
  write_tensors(model_file_, "", {{"extra", {1}}});
  std::vector<SafetensorsTensor> needed = tensors_of(*model_);
  needed[0].shape = {257, 64};
  needed.push_back({"h.2.ln_1.weight", {64}});
  const std::string error = error_of<InvalidUsage>([&] { HfCheckpointReader(directory_.path()).check(needed); });
  EXPECT_THAT(error, HasSubstr("missing: h.2.ln_1.weight;"));
  EXPECT_THAT(error, HasSubstr("of another shape: wte.weight[256, 64] (needs [257, 64])"));
  EXPECT_THAT(error, HasSubstr("unexpected: extra"));
}

}  // namespace
}  // namespace tessera::nn::test
