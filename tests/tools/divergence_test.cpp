#include "tools/train/step_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tessera/base/device_runtime.h"
#include "tessera/comm/init.h"

namespace tessera::tools {
namespace {

/// The messages of two ranks with these losses at step 7.
std::string said_for(double first, double second, std::optional<double> norm, int times = 1) {
  testing::internal::CaptureStderr();
  const auto host = base::open_device(base::Device{});
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(2, config, [&](comm::Communicator& comm) {
    comm::HostCollectives control(comm, *host);
    DivergenceMonitor monitor(control, "fsdp");
    for (int i = 0; i < times; ++i)
      monitor.after_step(7, comm.rank() == 0 ? first : second, (first + second) / 2, norm);
  });
  return testing::internal::GetCapturedStderr();
}

TEST(DivergenceMonitor, NamesStepAndRank) {
  EXPECT_THAT(said_for(1, NAN, 2.0),
              testing::StartsWith("tessera: warning: fsdp: step 7: the loss is nan on rank 1: "));
  EXPECT_THAT(said_for(INFINITY, 3, 2.0),
              testing::StartsWith("tessera: warning: fsdp: step 7: the loss is inf on rank 0: "));
  EXPECT_THAT(said_for(NAN, NAN, {}),
              testing::StartsWith("tessera: warning: fsdp: step 7: the loss is nan on every rank: "));
}

TEST(DivergenceMonitor, DetectsGradientsBeforeLoss) {
  EXPECT_THAT(said_for(1, 2, INFINITY),
              testing::StartsWith("tessera: warning: fsdp: step 7: the norm of the gradients is inf on every rank: "));
}

TEST(DivergenceMonitor, WarnsOnceOfNonFiniteValues) {
  const std::string once = said_for(1, NAN, 2.0, 3);
  EXPECT_EQ(std::count(once.begin(), once.end(), '\n'), 1);
  EXPECT_EQ(said_for(1, 2, 3.0, 3), "");
  EXPECT_EQ(said_for(1, 2, {}), "");
}

}  // namespace
}  // namespace tessera::tools
