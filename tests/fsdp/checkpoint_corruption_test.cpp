// Errors name damaged, missing and foreign files, and no incomplete checkpoint counts as complete.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

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
