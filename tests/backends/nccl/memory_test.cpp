// Device memory: its ownership and its registration with communicators.
#include "tests/backends/nccl/support.h"

namespace tessera::nccl_test {
namespace {

TEST(NcclMemory, RejectsUnregisteredMemory) {
  reset_fake();
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> host(4);
    EXPECT_EQ(error_of([&] { comm.all_reduce(view_of(host.data(), 4), view_of(host.data(), 4), ReduceOp::sum()); }),
              "Unsupported: all_reduce: backend nccl does not support memory of device cpu");
    OnDevice<float> elsewhere(comm, comm.rank() + 1, 4);
    EXPECT_EQ(error_of([&] { comm.broadcast(elsewhere.view(), elsewhere.view(), 0); }),
              "InvalidUsage: broadcast: memory is on cuda:" + std::to_string(comm.rank() + 1) +
                  ", this communicator needs cuda:" + std::to_string(comm.rank()));
    EXPECT_EQ(error_of([&] { comm.allocate(8, MemoryKind::host, {}); }),
              "Unsupported: nccl: allocate supports device memory only");
  });
}

TEST(NcclMemory, OlderAllocatorsAreNotUsed) {
  reset_fake({.version = 22503});
  comm::nccl::NcclApi api = fake_api();
  api.ncclMemAlloc = [](void**, std::size_t) { return ncclInternalError; };
  run_ranks(
      1,
      [](Communicator& world) {
        EXPECT_TRUE(world.allocate(4 << 20, MemoryKind::device, {}));
        EXPECT_EQ(fake_counts().registrations, 0);
      },
      quick_options(), api);
  reset_fake({.version = 22602});
  EXPECT_EQ(run_world(
                1, quick_options(), [](Communicator& world) { world.allocate(4 << 20, MemoryKind::device, {}); }, api)
                .front()
                .substr(0, 41),
            "SystemError: nccl: can't allocate 4194304");
}

TEST(NcclMemory, LargeBlocksAreRegisteredWithAllCommunicators) {
  reset_fake();
  const auto memory_tracker = std::make_shared<MemoryTracker>();
  BackendOptions options = quick_options();
  options.communicator.memory_tracker = memory_tracker;
  Buffer survivor;
  run_world(1, options, [&](Communicator& world) {
    const Buffer small = world.allocate(1000, MemoryKind::device, MemoryCategory::gradient);
    EXPECT_EQ(fake_counts().registrations, 0);
    Buffer large = world.allocate(4 << 20, MemoryKind::device, MemoryCategory::parameter);
    EXPECT_EQ(fake_counts().registrations, 1);
    {
      const auto child = world.split(0, 0);
      EXPECT_EQ(fake_counts().registrations, 2);
      const Buffer later = world.allocate(4 << 20, MemoryKind::device, {});
      EXPECT_EQ(fake_counts().registrations, 4);
    }
    EXPECT_EQ(fake_counts().registrations, 1);
    EXPECT_EQ(memory_tracker->snapshot().now_of(MemoryCategory::parameter), std::uint64_t{4} << 20);
    EXPECT_EQ(memory_tracker->snapshot().now_of(MemoryCategory::gradient), 1000u);
    survivor = std::move(large);
  });
  EXPECT_EQ(fake_counts().registrations, 0);
  EXPECT_EQ(fake_counts().blocks, 1);
  survivor.reset();
  EXPECT_TRUE(fake_counts().nothing_left());
  EXPECT_EQ(memory_tracker->snapshot().total_now, 0u);
}

TEST(NcclMemory, OldLibrarySkipsRegistration) {
  static const comm::nccl::NcclApi old = [] {
    comm::nccl::NcclApi api = fake_api();
    api.ncclMemAlloc = nullptr;
    api.ncclCommRegister = nullptr;
    return api;
  }();
  reset_fake();
  run_ranks(
      2,
      [](Communicator& comm) {
        OnDevice<float> x(comm, comm.rank(), 1 << 20, 1);
        EXPECT_EQ(fake_counts().registrations, 0);
        comm.all_reduce(x.view(), x.view(), ReduceOp::sum()).wait();
        EXPECT_EQ(x.values()[77], 2);
      },
      quick_options(), old);
}

}  // namespace
}  // namespace tessera::nccl_test
