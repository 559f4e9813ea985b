// Errors name damaged, missing and foreign files, and no incomplete checkpoint counts as complete.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <xxhash.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "tests/fsdp/checkpoint_support.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::train;
using harness::TrainingRecord;
using nn::test::error_of;
using nn::test::TemporaryDirectory;
using testing::HasSubstr;
namespace fs = std::filesystem;

class CheckpointCorruption : public testing::Test {
 protected:
  CheckpointCorruption() { train(saving(checkpoint_spec("fsdp", 2), directory_.path(), 1)); }
  std::string step(const std::string& name = "") const { return directory_.path("step-00000002/" + name); }
  static void flip(const std::string& path, std::streamoff at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(at);
    file.put(byte);
    ASSERT_TRUE(file.good());
  }
  std::string error() const {
    return error_of<base::InvalidUsage>([&] { train(resuming(checkpoint_spec("ddp", 2), directory_.path(), 2)); });
  }
  const TemporaryDirectory directory_;
};

TEST_F(CheckpointCorruption, ReadsIntactCheckpoint) {
  EXPECT_EQ(error(), "");
  Checkpoint checkpoint(directory_.path());
  EXPECT_TRUE(checkpoint.verify().empty());
  EXPECT_EQ(checkpoint.ranks(), 2);
  EXPECT_EQ(checkpoint.strategy(), "fsdp");
  EXPECT_EQ(checkpoint.attributes(), (Attributes{{"colour", "blue"}}));
  EXPECT_EQ(checkpoint.tensors().size(), 28u);
  EXPECT_EQ(latest_checkpoint(directory_.path()), step().substr(0, step().size() - 1));
}

TEST_F(CheckpointCorruption, ErrorNamesFileAndTensorOfFlippedBit) {
  flip(step("rank-00001.safetensors"), 3 * 65536 + 17);
  EXPECT_THAT(error(), HasSubstr("rank-00001.safetensors: damaged: block 3"));
  Checkpoint checkpoint(directory_.path());
  const std::vector<std::string> wrong = checkpoint.verify();
  ASSERT_EQ(wrong.size(), 1u);
  EXPECT_THAT(wrong[0], HasSubstr("rank-00001.safetensors: damaged: block 3 (64 KiB from byte 196608) of '"));
}

TEST_F(CheckpointCorruption, DetectsFlippedBitInManifestOrIndex) {
  flip(step("rank-00000.json"), 300);
  EXPECT_THAT(error(), HasSubstr("rank-00000.json: damaged"));
  flip(step("rank-00000.json"), 300);
  EXPECT_EQ(error(), "");
  flip(step("index.json"), 40);
  EXPECT_THAT(error(), HasSubstr("index.json: "));
}

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void replace_in(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = text_of(path);
  ASSERT_NE(text.find(from), std::string::npos);
  text.replace(text.find(from), from.size(), to);
  std::ofstream(path, std::ios::binary) << text;
}

/// Damage that leaves valid JSON and an otherwise valid checkpoint.
TEST_F(CheckpointCorruption, DetectsChangedWordInIndex) {
  replace_in(step("index.json"), "blue", "glue");
  EXPECT_THAT(error(), HasSubstr("index.json: damaged: its hash differs"));
  replace_in(step("index.json"), "glue", "blue");
  EXPECT_EQ(error(), "");
}

using nlohmann::ordered_json;
using Edit = std::function<void(ordered_json&)>;

std::string hash_of(const std::string& text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  std::array<char, 33> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits.data();
}

/// Edits the manifest of rank 0 and the index of a checkpoint, with hashes that fit: they find damage, not intent.
class Forgery {
 public:
  explicit Forgery(const std::string& step)
      : step_(step), manifest_(text_of(step + "rank-00000.json")), index_(text_of(step + "index.json")) {}
  ~Forgery() {
    write("rank-00000.json", manifest_);
    write("index.json", index_);
  }
  void make(const Edit& edit_manifest, const Edit& edit_index) const {
    ordered_json manifest = ordered_json::parse(manifest_), index = ordered_json::parse(index_);
    if (edit_manifest) edit_manifest(manifest);
    const std::string text = manifest.dump();
    index["manifests"][0] = hash_of(text);
    index.erase("xxh3");
    if (edit_index) edit_index(index);
    index["xxh3"] = hash_of(index.dump());
    write("rank-00000.json", text);
    write("index.json", index.dump());
  }

 private:
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(step_ + name, std::ios::binary) << text;
  }
  const std::string step_, manifest_, index_;
};

/// The first value among the slices of a manifest; [tensor, what, begin, end, dtype, offset].
ordered_json& slice_of(ordered_json& manifest, int what) {
  for (ordered_json& slice : manifest["pieces"])
    if (slice[1] == what) return slice;
  throw std::logic_error("no such slice");
}

TEST_F(CheckpointCorruption, ForgedSlicesAreRefused) {
  const Forgery forgery(step());
  const auto refused = [&](const Edit& manifest) {
    forgery.make(manifest, nullptr);
    return error_of<base::InvalidUsage>([&] { Checkpoint(directory_.path()).verify(); });
  };
  EXPECT_EQ(refused(nullptr), "");  // the control
  const auto set = [&](int field, const ordered_json& value) {
    return refused([&](ordered_json& manifest) { slice_of(manifest, -1)[static_cast<std::size_t>(field)] = value; });
  };
  const std::int64_t wraps = std::int64_t{1} << 62;  // bytes would be 2^64
  EXPECT_THAT(set(3, wraps), HasSubstr("pieces[0][3] is 4611686018427387904; needs a whole number from 0 to 9007"));
  EXPECT_THAT(set(3, std::int64_t{1} << 53), HasSubstr("outside its file"));
  EXPECT_THAT(set(2, 5), HasSubstr("element 0 of '"));
  EXPECT_THAT(set(2, -1), HasSubstr("[2] is -1; needs"));
  EXPECT_THAT(set(2, 1 << 20), HasSubstr("outside its file"));  // ends before it begins
  EXPECT_THAT(set(3, 1.5), HasSubstr("needs a whole number"));
  EXPECT_THAT(set(3, "4"), HasSubstr("needs a whole number"));
  EXPECT_THAT(set(5, std::uint64_t{1} << 63), HasSubstr("[5] is 9223372036854775808"));
  EXPECT_THAT(set(5, 1 << 30), HasSubstr("outside its file"));
  EXPECT_THAT(set(4, "f64"), HasSubstr("has the dtype f64"));
  EXPECT_THAT(set(4, "i64"), HasSubstr("has the dtype i64"));
  EXPECT_THAT(set(4, "x"), HasSubstr("unknown dtype 'x'"));
  EXPECT_THAT(set(4, "f16"), testing::Eq(""));  // half the bytes: only the values are others
  EXPECT_THAT(set(1, 7), HasSubstr("is missing"));
  EXPECT_THAT(set(1, -4), HasSubstr("needs a whole number from -3"));
  EXPECT_THAT(set(0, "other"), HasSubstr("is missing"));
  EXPECT_THAT(refused([](ordered_json& m) { m["pieces"].push_back(m["pieces"][0]); }), HasSubstr("is stored twice"));
  EXPECT_THAT(refused([](ordered_json& m) {
                m["pieces"].push_back(m["pieces"][0]);
                m["pieces"].back()[0] = "other";
              }),
              HasSubstr("stores 'other', which the index does not have"));
  EXPECT_THAT(refused([](ordered_json& m) { slice_of(m, 1)[1] = 2; }), HasSubstr("the optimizer state of '"));
  EXPECT_THAT(refused([](ordered_json& m) { m["bytes"] = std::int64_t{1} << 60; }), HasSubstr("bytes is 11529"));
  EXPECT_THAT(refused([](ordered_json& m) { m["rank"] = 1; }), HasSubstr("is that of rank 1"));
  EXPECT_THAT(refused([](ordered_json& m) { m["blocks"].get_ref<std::string&>()[3] = 'x'; }), HasSubstr("hexadecimal"));
}

TEST_F(CheckpointCorruption, ForgedIndexIsRefused) {
  const Forgery forgery(step());
  const auto refused = [&](const Edit& index) {
    forgery.make(nullptr, index);
    return error();
  };
  EXPECT_EQ(refused(nullptr), "");  // the control
  const auto set = [&](const char* field, const ordered_json& value) {
    return refused([&](ordered_json& index) { index["tensors"][3][field] = value; });
  };
  const std::int64_t large = std::int64_t{1} << 32;
  EXPECT_THAT(set("shape", {large, large}), HasSubstr("needs extents of 0 or more, and no more elements than"));
  EXPECT_THAT(set("shape", {-1, 4}), HasSubstr("needs extents of 0 or more"));
  EXPECT_THAT(set("shape", {1}), HasSubstr("but the index has only 1"));
  EXPECT_THAT(set("shape", {1 << 20}), HasSubstr("is missing"));
  EXPECT_THAT(set("states", 3), HasSubstr("is missing"));
  EXPECT_THAT(set("states", 1), HasSubstr("more optimizer states than the index has"));
  EXPECT_THAT(set("states", std::int64_t{1} << 31), HasSubstr("tensors[3].states is"));
  EXPECT_THAT(set("trained_since", 3), HasSubstr("is trained since a later step"));
  EXPECT_THAT(refused([](ordered_json& i) { i["tensors"][3] = i["tensors"][2]; }), HasSubstr("' twice"));
  EXPECT_THAT(refused([](ordered_json& i) { i["step"] = std::uint64_t{1} << 63; }), HasSubstr("step is 9223"));
  EXPECT_THAT(refused([](ordered_json& i) { i["attributes"]["x"] = 1; }), HasSubstr("attributes.x is 1; needs a text"));
  EXPECT_THAT(refused([](ordered_json& i) {
                i["buffers"] = {{{"name", "b"}, {"shape", {1}}, {"dtype", "f32"}}};
              }),
              HasSubstr("element 0 of the buffer 'b' is missing"));
  EXPECT_EQ(refused([](ordered_json& i) { std::reverse(i["tensors"].begin(), i["tensors"].end()); }), "");
}

TEST_F(CheckpointCorruption, DeepJsonIsRefusedBeforeItsHash) {
  const std::string text = text_of(step("index.json")), deep = std::string(300'000, '[') + std::string(300'000, ']');
  std::ofstream(step("index.json"), std::ios::binary) << text.substr(0, text.rfind('}')) << ",\"z\":" << deep << "}";
  EXPECT_THAT(error(), HasSubstr("index.json: is nested more than 64 deep"));
  std::ofstream(step("index.json"), std::ios::binary) << text;
  EXPECT_EQ(error(), "");  // the control
}

/// If the newest checkpoint is damaged, resuming fails instead of silently using an older one.
TEST_F(CheckpointCorruption, RejectsDamagedNewestCheckpoint) {
  train(saving(checkpoint_spec("fsdp", 2, 3), directory_.path(), 2));
  EXPECT_EQ(Checkpoint(directory_.path()).step(), 3U);
  replace_in(directory_.path("step-00000003/index.json"), "blue", "glue");
  EXPECT_THAT(error(), HasSubstr("step-00000003/index.json: damaged"));
  EXPECT_EQ(Checkpoint(step()).step(), 2U) << "by name the older one is read";
}

TEST_F(CheckpointCorruption, ErrorNamesShortAndMissingFiles) {
  fs::resize_file(step("rank-00001.safetensors"), 1000);
  EXPECT_THAT(error(), HasSubstr("rank-00001.safetensors: has 1000 bytes instead of "));
  fs::remove(step("rank-00001.safetensors"));
  EXPECT_THAT(error(), HasSubstr("rank-00001.safetensors: can't be opened (No such file"));
  fs::rename(directory_.path("step-00000002"), directory_.path("step-00000002.partial"));
  EXPECT_THAT(error(), HasSubstr("contains no complete checkpoint"));
  EXPECT_EQ(latest_checkpoint(directory_.path()), "");
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { Checkpoint checkpoint(directory_.path("nowhere")); }),
              HasSubstr("nowhere: no such directory"));
}

TEST_F(CheckpointCorruption, RejectsOtherModelOrOptimizer) {
  TrainingSpec deeper = checkpoint_spec("fsdp", 2);
  deeper.model.layers = 3;
  const auto refused = [&](const TrainingSpec& spec) {
    return error_of<base::InvalidUsage>([&] { train(resuming(spec, directory_.path(), 2)); });
  };
  EXPECT_THAT(refused(deeper), HasSubstr("does not match the model: it lacks 'h.2.ln_1.weight'"));
  TrainingSpec shallower = checkpoint_spec("fsdp", 2);
  shallower.model.layers = 1;
  EXPECT_THAT(refused(shallower), HasSubstr("the model has no 'h.1."));
  TrainingSpec wider = checkpoint_spec("fsdp", 2);
  wider.model.vocabulary = 300;
  EXPECT_THAT(refused(wider), HasSubstr("has shape"));
  TrainingSpec other = checkpoint_spec("fsdp", 2);
  other.engine.optimizer.kind = nn::OptimizerConfig::Kind::sgd;
  EXPECT_THAT(refused(other), HasSubstr("the optimizer kept 2 values for each element"));
}

TEST_F(CheckpointCorruption, NonStrictRestoreReadsCommonParameters) {
  TrainingSpec deeper = checkpoint_spec("fsdp", 2, 0);
  deeper.model.layers = 3;
  std::vector<float> before, after;
  deeper.before_training = [&](Engine& engine, comm::Communicator& control) {
    Checkpoint checkpoint(directory_.path());
    const RestoreReport report = restore(engine, checkpoint, {.optimizer = false, .strict = false});
    EXPECT_EQ(report.missing.size(), 12u);
    EXPECT_TRUE(report.unexpected.empty());
    EXPECT_EQ(engine.steps(), 0u);
    if (control.rank() != 0) return;
    before.resize(64 * 64 * 4);
    checkpoint.read("h.1.mlp.c_fc.weight", Checkpoint::kValue, {0, 64 * 64 * 4}, before.data());
  };
  const TrainingRecord record = train(deeper);
  EXPECT_EQ(record.parameters.at("h.1.mlp.c_fc.weight"), before);
  TrainingSpec fresh = deeper;
  fresh.before_training = {};
  EXPECT_EQ(record.parameters.at("h.2.mlp.c_fc.weight"), train(fresh).parameters.at("h.2.mlp.c_fc.weight"));
}

}  // namespace
}  // namespace tessera::fsdp
