// config.json, and folders in the format of transformers.
#include "tessera/nn/hf_checkpoint.h"

#include <gmock/gmock.h>

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
    ModelConfig read = parse_config(config_json(config), "config.json");
    read.name = name;
    EXPECT_EQ(read, config) << config_json(config);
  }
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

TEST(Config, NamesUnsupportedFields) {
  const std::string gpt = R"({"model_type":"gpt2",)", llama = R"({"model_type":"llama",)";
  EXPECT_THAT(refused("{"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refused("[]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(refused(std::string(5000, '[')), HasSubstr("not a JSON object"));
  EXPECT_THAT(refused("{}"), HasSubstr("model_type"));
  EXPECT_THAT(refused(R"({"model_type":"bert"})"), HasSubstr("'bert'"));
  EXPECT_THAT(refused(gpt + R"("n_embd":"x"})"), HasSubstr("'n_embd'"));
  EXPECT_THAT(refused(gpt + R"("n_embd":-5})"), HasSubstr("needs 1 or more"));
  EXPECT_THAT(refused(gpt + R"("n_embd":9223372036854775807})"), HasSubstr("config.json"));
  EXPECT_THAT(refused(gpt + R"("n_head":5})"), HasSubstr("5 heads"));
  EXPECT_THAT(refused(gpt + R"("resid_pdrop":1.5})"), HasSubstr("dropout"));
  EXPECT_THAT(refused(gpt + R"("activation_function":"mish"})"), HasSubstr("'mish'"));
  EXPECT_THAT(refused(gpt + R"("scale_attn_by_inverse_layer_idx":true})"),
              HasSubstr("scale_attn_by_inverse_layer_idx"));
  EXPECT_THAT(refused(llama + R"("attention_bias":true})"), HasSubstr("attention_bias"));
  EXPECT_THAT(refused(llama + R"("rope_scaling":{"type":"linear","factor":2}})"), HasSubstr("linear"));
  EXPECT_THAT(refused(llama + R"("rope_parameters":{"rope_type":"llama3","rope_theta":1}})"), HasSubstr("llama3"));
  EXPECT_THAT(refused(llama + R"("num_key_value_heads":5})"), HasSubstr("5 key heads"));
  EXPECT_THAT(error_of<InvalidUsage>([] { find_config("gpt-5"); }), HasSubstr("gpt-nano gpt-mini gpt2"));
  EXPECT_THAT(error_of<InvalidUsage>([] { find_config("none.json"); }), HasSubstr("none.json"));
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

TEST_F(HfCheckpoints, ReadTheirExport) {
  HfCheckpointWriter writer(directory_.path("out/deep"), config_, tensors_of(*model_));
  for (const auto& parameter : model_->parameters())
    writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
  writer.commit();
  const HfCheckpointReader opened(directory_.path("out/deep"));
  ModelConfig read = opened.config();
  read.name = config_.name;
  EXPECT_EQ(read, config_);
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
  write_tensors(
      model_file_, "transformer.",
      {{"transformer.h.0.attn.bias", {1, 1, 4, 4}}, {"h.1.attn.masked_bias", {}}, {"lm_head.weight", {256, 64}}});
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
