// Module buffers in checkpoints and directories: saved once, from rank 0, and reported by name if missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/hf_checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/fsdp/models.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::train;
using nn::test::error_of;
using nn::test::TemporaryDirectory;
using testing::ElementsAre;
using testing::HasSubstr;

/// With values that no initialization produces.
TrainingSpec with_odd_values(TrainingSpec spec) {
  spec.before_training = [](Engine& engine, comm::Communicator&) {
    engine.state().load_buffers(
        [](const fsdp::ModuleBuffer&, void* out) {
          const std::int64_t values[] = {std::int64_t{1} << 60, -5};
          std::memcpy(out, values, sizeof(values));
        },
        [](const fsdp::ModuleBuffer& buffer) { return buffer.dtype() == DType::i64; });
  };
  return spec;
}

std::vector<double> tail(const std::vector<double>& losses) { return {losses.end() - 2, losses.end()}; }

/// With BufferSync::first_rank all state is resumed, including buffers that feed back; with buffers per rank only
/// rank 0's.
TEST(ModuleBufferCheckpoint, ResumedRunEqualsUninterrupted) {
  for (const char* strategy : {"ddp", "fsdp", "zero1"})
    for (const bool first_rank : {true, false}) {
      const TemporaryDirectory directory;
      TrainingSpec spec = buffer_spec(strategy, 2, {.feeds_back = first_rank});
      if (first_rank) spec.engine.buffers = BufferSync::first_rank;
      const BufferRecord whole = train_buffers(saving(with_odd_values(spec), directory.path(), 1));
      const BufferRecord resumed = train_buffers(resuming(spec, directory.path(), 2));
      EXPECT_EQ(resumed.training.parameters, whole.training.parameters);
      EXPECT_EQ(resumed.training.losses, tail(whole.training.losses));
      EXPECT_EQ(resumed.buffers[0], whole.buffers[0]);
      EXPECT_EQ(resumed.buffers[1] == whole.buffers[1], first_rank) << "others go on from rank 0's";
      TrainingSpec forgetful = resuming(spec, directory.path(), 2);
      forgetful.before_training = [read = forgetful.before_training](Engine& engine, comm::Communicator& control) {
        const BufferBytes initial = buffers_of(engine);
        read(engine, control);
        EXPECT_NE(buffers_of(engine), initial);
        engine.state().load_buffers([&](const fsdp::ModuleBuffer& buffer, void* out) {
          std::copy(initial.at(buffer.name()).begin(), initial.at(buffer.name()).end(), static_cast<std::byte*>(out));
        });
      };
      const BufferRecord control = train_buffers(forgetful);
      EXPECT_NE(control.buffers[0], whole.buffers[0]) << "the control";
      EXPECT_EQ(control.training.parameters != whole.training.parameters, first_rank) << "the control";
    }
}

TEST(ModuleBufferCheckpoint, SavesBuffersOnceAndRestoresOnAnyWorld) {
  const TemporaryDirectory directory;
  const BufferRecord saved = [&] {
    TrainingSpec spec = buffer_spec("fsdp", 3);
    spec.steps = 2;
    return train_buffers(saving(with_odd_values(spec), directory.path(), 1));
  }();
  Checkpoint checkpoint(directory.path());
  std::vector<std::string> names;
  for (const CheckpointBuffer& buffer : checkpoint.buffers()) names.push_back(buffer.name);
  EXPECT_THAT(names, ElementsAre("inner.batches", "inner.count", "inner.running_mean", "last.batches", "last.count",
                                 "last.running_mean"));
  for (const CheckpointTensor& tensor : checkpoint.tensors())
    EXPECT_THAT(names, testing::Not(testing::Contains(tensor.name)));
  std::uintmax_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(checkpoint.directory())) {
    if (entry.path().extension() != ".safetensors") continue;
    const nn::SafetensorsFile file(entry.path().string());
    for (const nn::SafetensorsEntry& e : file.entries())
      if (e.name.starts_with("buffer/")) bytes += file.bytes(e).size();
  }
  EXPECT_EQ(bytes, 2U * (64 * 4 + 4 + 16));
  for (const auto& [strategy, ranks] : {std::pair("ddp", 1), std::pair("zero2", 2), std::pair("fsdp", 4)}) {
    TrainingSpec spec = buffer_spec(strategy, ranks);
    spec.steps = 0;
    spec = resuming(spec, directory.path(), 0);
    spec.before_training = [&, read = spec.before_training](Engine& engine, comm::Communicator& control) {
      const BufferBytes initial = buffers_of(engine);
      read(engine, control);
      const BufferBytes found = buffers_of(engine);
      for (const std::string& name : names) {
        EXPECT_EQ(found.at(name), saved.buffers[0].at(name)) << name;
        EXPECT_NE(found.at(name), initial.at(name)) << "the control: " << name;
      }
    };
    train(spec);
  }
}

/// The same model without module buffers.
TrainingSpec without(const char* strategy) {
  TrainingSpec spec = buffer_spec(strategy, 1);
  spec.steps = 1;
  class Plain : public nn::CausalModel {
   public:
    Plain(nn::Context& context, const nn::ModelConfig& config)
        : CausalModel(context, config),
          wte_(add<nn::Embedding>("wte", nn::EmbeddingOptions{config.vocabulary, config.width})),
          first_(add<nn::Gpt2Block>("h.0", config)),
          second_(add<nn::Gpt2Block>("h.1", config)),
          lm_head_(add<nn::LmHead>("lm_head", wte_, true, 0.02)) {}

   private:
    nn::Tensor hidden(const nn::Tensor& tokens) override { return second_(first_(wte_(tokens))); }
    nn::Tensor logits(const nn::Tensor& x) override { return lm_head_(x); }
    nn::Embedding& wte_;
    nn::Gpt2Block &first_, &second_;
    nn::LmHead& lm_head_;
  };
  spec.make_model = [config = spec.model](nn::Context& context) { return std::make_unique<Plain>(context, config); };
  return spec;
}

TEST(ModuleBufferCheckpoint, ErrorNamesMissingUnexpectedAndDifferentBuffers) {
  const TemporaryDirectory with, none;
  TrainingSpec spec = buffer_spec("fsdp", 1);
  spec.steps = 1;
  train(saving(with_odd_values(spec), with.path(), 0));
  train(saving(with_odd_values(without("fsdp")), none.path(), 0));
  const auto read = [](TrainingSpec to, const std::string& directory, bool strict) {
    RestoreReport report;
    to.steps = 0;
    to.before_training = [&](Engine& engine, comm::Communicator&) {
      Checkpoint checkpoint(directory);
      report = restore(engine, checkpoint, {.strict = strict});
    };
    train(to);
    return report;
  };
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { read(spec, none.path(), true); }),
              HasSubstr("it lacks 'inner.running_mean', 'inner.count', 'inner.batches'"));
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { read(without("fsdp"), with.path(), true); }),
              HasSubstr("the model has no 'inner.batches', 'inner.count', 'inner.running_mean'"));
  EXPECT_EQ(read(spec, none.path(), false).missing.size(), 6U);
  EXPECT_EQ(read(without("fsdp"), with.path(), false).unexpected.size(), 6U);
  EXPECT_TRUE(read(spec, with.path(), true).missing.empty());
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { read(buffer_spec("ddp", 1, {.counts = 2}), with.path(), false); }),
              HasSubstr("buffer 'inner.count' is f32 [1], the model's f32 [2]"));
}

TEST(ModuleBufferCheckpoint, ErrorNamesDamagedBuffers) {
  const TemporaryDirectory directory;
  TrainingSpec spec = buffer_spec("fsdp", 2);
  spec.steps = 1;
  train(saving(with_odd_values(spec), directory.path(), 0));
  std::vector<std::byte> out(64 * 4);
  {
    Checkpoint whole(directory.path());
    whole.read_buffer("last.running_mean", out);
    EXPECT_TRUE(whole.verify().empty());
    EXPECT_THAT(error_of<base::InvalidUsage>([&] { whole.read_buffer("last.nothing", out); }),
                HasSubstr("buffer 'last.nothing' is missing"));
  }
  const std::string path = Checkpoint(directory.path()).directory() + "/rank-00000.safetensors";
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(size - 20);
  file.put('\x55');
  file.close();
  Checkpoint damaged(directory.path());
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { damaged.read_buffer("last.batches", out); }),
              HasSubstr("'last.batches'"));
}

TEST(ModuleBufferCheckpoint, HuggingFaceExportKeepsBufferNames) {
  const TemporaryDirectory directory;
  TrainingSpec spec = buffer_spec("ddp", 1);
  spec.steps = 2;
  BufferBytes written;
  const nn::ModelConfig config = spec.model;
  spec.after_step = [&](int, int step, Engine& engine, nn::CausalModel& model) {
    if (step != 1) return;
    written = buffers_of(engine);
    nn::HfCheckpointWriter writer(directory.path(), config, nn::saved_tensors(model));
    engine.state().for_each_parameter([&](const fsdp::Parameter& parameter, std::span<const float> values) {
      writer.write(parameter.name(), {0, parameter.count()}, values.data());
    });
    for (const auto& buffer : engine.state().buffers())
      if (buffer->persistent()) writer.write_whole(buffer->name(), written.at(buffer->name()));
    writer.commit();
  };
  train(spec);
  const nn::HfCheckpointReader read(directory.path());
  nn::Context context;
  read.check(nn::saved_tensors(*spec.make_model(context)));
  std::vector<std::byte> bytes;
  for (const auto& buffer : spec.make_model(context)->buffers()) {
    if (!buffer->persistent()) continue;
    bytes.resize(buffer->tensor().bytes());
    read.read_whole(buffer->name(), buffer->dtype(), bytes);
    EXPECT_EQ(bytes, written.at(buffer->name())) << buffer->name();
  }
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { read.read_whole("inner.batches", DType::f32, bytes); }),
              HasSubstr("is I64, needs F32"));
  EXPECT_THAT(error_of<base::InvalidUsage>([&] { read.read_whole("inner.one", DType::f32, bytes); }),
              HasSubstr("no tensor"))
      << "not persistent";
}

}  // namespace
}  // namespace tessera::fsdp
