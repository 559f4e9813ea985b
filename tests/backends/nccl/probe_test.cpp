// Whether the backend is available, and the reason if it is not.
#include <gmock/gmock.h>

#include "backends/nccl/api.h"
#include "tests/backends/nccl/support.h"

namespace tessera::comm::nccl {
const comm::Backend& backend();
}

namespace tessera::nccl_test {
namespace {

TEST(NcclProbe, NamesReasonWithoutDevice) {
  reset_fake();
  EXPECT_EQ(comm::nccl::unusable(fake_api()), "");
  reset_fake({.devices = 0});
  EXPECT_EQ(comm::nccl::unusable(fake_api()), "no CUDA device: the driver sees none");
  reset_fake({.driver_error = cudaErrorInsufficientDriver});
  EXPECT_EQ(comm::nccl::unusable(fake_api()),
            "no CUDA device: CUDA driver version is insufficient for CUDA runtime version");
  reset_fake({.version = 21205});
  EXPECT_EQ(comm::nccl::unusable(fake_api()), "NCCL is version 2.12.5, needs 2.18.1 or newer");
}

/// With and without the real libraries the probe returns a result and does not crash.
TEST(NcclProbe, SucceedsOnThisMachine) {
  const std::string reason = comm::nccl::backend().probe();
  std::cout << "reason: '" << reason << "'\n";
  if (comm::nccl::loaded_api().problem.empty()) {
    EXPECT_TRUE(reason.empty() || reason.starts_with("no CUDA device: ")) << reason;
  } else {
    EXPECT_EQ(reason, comm::nccl::loaded_api().problem);
  }
}

TEST(NcclProbe, RejectsUnsupportedOptionsAtStart) {
  reset_fake();
  BackendOptions ordered = quick_options();
  ordered.deterministic = true;
  ordered.algorithms = "all_reduce=direct,all_gather=direct";
  run_ranks(
      2, [](Communicator& comm) { EXPECT_TRUE(comm.capabilities().deterministic); }, ordered);
  ordered.algorithms = "all_reduce=direct,all_gather=ring";
  for (const std::string& error : run_world(2, ordered, [](Communicator&) {}))
    EXPECT_EQ(error, "InvalidUsage: TESSERA_ALGO: nccl chooses its algorithms itself; use NCCL_ALGO");
  ordered.algorithms = "";
  BackendOptions named = quick_options();
  named.algorithms = "all_reduce=direct";
  for (const std::string& error : run_world(2, named, [](Communicator&) {}))
    EXPECT_EQ(error, "InvalidUsage: TESSERA_ALGO: nccl chooses its algorithms itself; use NCCL_ALGO");
  run_ranks(
      1, [](Communicator& comm) { EXPECT_TRUE(comm.capabilities().deterministic); }, ordered);
  run_ranks(2, [](Communicator& comm) { EXPECT_FALSE(comm.capabilities().deterministic); });
  EXPECT_FALSE(comm::nccl::backend().deterministic);
}

TEST(NcclSharedGpu, IsAllowedAsTheVersionNeedsIt) {
  const auto environment = [](const FakeOptions& fake, int ranks) {
    reset_fake(fake);
    run_ranks(ranks, [](Communicator& comm) { comm.barrier().wait(); });
    return fake_environment();
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(environment({.devices = 2, .version = 23001}, 3),
            (Names{"NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_NVLS_ENABLE=0", "NCCL_MAX_CTAS=2"}));
  EXPECT_EQ(
      environment({.devices = 2, .version = 22907}, 3),
      (Names{"NCCL_HOSTID=r0", "NCCL_HOSTID=r1", "NCCL_HOSTID=r2", "NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME=lo"}));
  EXPECT_EQ(environment({.devices = 3, .version = 22907}, 3), Names{}) << "each rank has its own";
  const auto apart = comm::nccl::settings_for_shared_gpu(22907, 5, false);
  ASSERT_EQ(apart.size(), 2U) << "several hosts choose their network";
  EXPECT_EQ(apart[0].value, "r5");
}

TEST(NcclProbe, LoadsKernelsBeforeAnyStreamCanWait) {
  reset_fake();
  run_ranks(3, [](Communicator&) {});
  EXPECT_EQ(fake_counts().kernel_loads, 3);
}

TEST(NcclProbe, AllRanksNameRankWithoutDevice) {
  reset_fake({.driver_error = cudaErrorInsufficientDriver});
  for (const std::string& error : run_world(2, quick_options(), [](Communicator&) {}))
    EXPECT_EQ(error,
              "BackendError: nccl: no CUDA device: CUDA driver version is insufficient for CUDA runtime version");
}

TEST(NcclProbe, UsesTheProgramsDevice) {
  const auto world_on = [](int index) {
    return error_of([index] {
      BackendOptions options = quick_options();
      options.device = Device{DeviceType::cuda, index};
      comm::nccl::make_world(make_thread_bootstraps(1, options.communicator.timeout).front(), options, fake_api());
    });
  };
  reset_fake();
  EXPECT_EQ(world_on(0), "");
  EXPECT_THAT(world_on(99), testing::HasSubstr("there is no device cuda:99; this host has"));
}

}  // namespace
}  // namespace tessera::nccl_test
