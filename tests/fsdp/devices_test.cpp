// The engine on a device whose memory the host can't touch: one rank, so that only the engine itself is tried.
#include <gtest/gtest.h>

#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using harness::TrainingRecord;
using harness::TrainingSpec;

TrainingRecord train_on(const std::string& strategy, std::shared_ptr<base::DeviceRuntime> runtime) {
  TrainingSpec spec;
  spec.ranks = 1;
  spec.global_batch = 4;
  spec.engine = harness::engine_for(strategy);
  spec.engine.clip_norm = 0.5;
  spec.engine.poison = true;
  spec.runtime = std::move(runtime);
  return harness::train(spec);
}

class EngineDevices : public testing::TestWithParam<const char*> {};

TEST_P(EngineDevices, TheHostTouchesNothingOfAnotherDevice) {
  const TrainingRecord guarded = train_on(GetParam(), harness::make_guarded_device());
  const TrainingRecord host = train_on(GetParam(), nullptr);
  EXPECT_EQ(guarded.losses, host.losses);
  EXPECT_EQ(guarded.norms, host.norms);
  EXPECT_EQ(guarded.parameters, host.parameters);
  EXPECT_EQ(guarded.model_state, host.model_state);
  EXPECT_FALSE(guarded.parameters.empty());
}

INSTANTIATE_TEST_SUITE_P(Strategies, EngineDevices, testing::Values("ddp", "zero1", "zero2", "fsdp"),
                         [](const auto& given) { return std::string(given.param); });

}  // namespace
}  // namespace tessera::fsdp
