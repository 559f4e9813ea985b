// tessera checkpoint on a checkpoint whose model has module buffers.
#include <gmock/gmock.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/fsdp/checkpoint.h"
#include "tests/fsdp/models.h"
#include "tests/nn/temporary_directory.h"
#include "tools/cli/commands.h"

namespace tessera::tools {
namespace {

using testing::HasSubstr;

/// The output of the command.
std::string run(const std::string& line) {
  CLI::App app;
  CommandLine commands{.app = app, .arguments = {}, .program = {}, .chosen = {}};
  add_checkpoint(commands);
  app.parse(line);
  testing::internal::CaptureStdout();
  EXPECT_EQ(commands.chosen(), 0);
  std::fflush(stdout);
  return testing::internal::GetCapturedStdout();
}

TEST(CheckpointInspect, ShowsBuffers) {
  const nn::test::TemporaryDirectory directory;
  harness::TrainingSpec spec = fsdp::buffer_spec("fsdp", 1);
  spec.steps = 1;
  comm::Communicator* world = nullptr;
  spec.before_training = [&](fsdp::Engine&, comm::Communicator& control) { world = &control; };
  spec.after_step = [&](int, int, fsdp::Engine& engine, nn::CausalModel& model) {
    comm::HostCollectives control(*world, model.context().runtime());
    fsdp::CheckpointWriter(engine, control, {.directory = directory.path("c"), .asynchronous = false}).save({});
  };
  harness::train(spec);
  const std::string text =
      run("checkpoint inspect " + directory.path("c") + " --tensors --json " + directory.path("j"));
  EXPECT_THAT(text, HasSubstr("\n6 buffers\n"));
  EXPECT_THAT(text, HasSubstr("inner.running_mean [64] f32, a buffer"));
  EXPECT_THAT(text, HasSubstr("last.batches [2] i64, a buffer"));
  EXPECT_THAT(text, testing::Not(HasSubstr("inner.one"))) << "which is not persistent";
  std::ifstream file(directory.path("j"));
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json.at("buffers").size(), 6U);
  EXPECT_EQ(json.at("buffers")[0], nlohmann::json({{"name", "inner.batches"}, {"shape", {2}}, {"dtype", "i64"}}));
  EXPECT_THAT(run("checkpoint verify " + directory.path("c")), HasSubstr("whole"));
}

}  // namespace
}  // namespace tessera::tools
