// The engine on a device whose memory the host can't touch: alone, and with ranks whose communicators stage it.
#include <gtest/gtest.h>

#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using harness::TrainingRecord;
using harness::TrainingSpec;

TrainingRecord train_on(const std::string& strategy, int ranks, std::shared_ptr<base::DeviceRuntime> runtime) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 4;
  spec.engine = harness::engine_for(strategy);
  spec.engine.clip_norm = 0.5;
  spec.engine.poison = true;
  spec.runtime = std::move(runtime);
  return harness::train(spec);
}

class EngineDevices : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(EngineDevices, TheHostTouchesNothingOfAnotherDevice) {
  const auto& [strategy, ranks] = GetParam();
  const TrainingRecord guarded = train_on(strategy, ranks, harness::make_guarded_device({.lazy = ranks > 1}));
  const TrainingRecord host = train_on(strategy, ranks, nullptr);
  EXPECT_EQ(guarded.losses, host.losses);
  EXPECT_EQ(guarded.norms, host.norms);
  EXPECT_EQ(guarded.parameters, host.parameters);
  EXPECT_EQ(guarded.model_state, host.model_state);
  EXPECT_FALSE(guarded.parameters.empty());
}

INSTANTIATE_TEST_SUITE_P(Strategies, EngineDevices,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "fsdp"), testing::Values(1, 2)),
                         [](const auto& given) {
                           return std::string(std::get<0>(given.param)) + "_" +
                                  std::to_string(std::get<1>(given.param));
                         });

}  // namespace
}  // namespace tessera::fsdp
