// Devices: the backend creates a context on the rank's own one alone, and leaves the program's thread its device.
#include <future>

#include "tests/backends/nccl/support.h"

namespace tessera::nccl_test {
namespace {

/// Runs `body` on 2 ranks, whose devices are 1 and 2, in threads that have chosen no device.
std::vector<std::string> run_on_devices(const std::function<void(Communicator&, int device)>& body) {
  const auto bootstraps = make_thread_bootstraps(2, 20s);
  std::vector<std::future<std::string>> results;
  for (const auto& bootstrap : bootstraps)
    results.push_back(std::async(std::launch::async, [&, bootstrap] {
      return error_of([&] {
        BackendOptions options = quick_options();
        options.device = Device{DeviceType::cuda, bootstrap->rank() + 1};
        const auto world = comm::nccl::make_world(bootstrap, options, fake_api());
        body(*world, bootstrap->rank() + 1);
      });
    }));
  std::vector<std::string> errors;
  for (auto& result : results) errors.push_back(result.get());
  return errors;
}

void use_all(Communicator& world, int device) {
  const auto copy = world.split(0, world.rank());
  auto part = world.split(0, -world.rank());
  for (Communicator* comm : {&world, copy.get(), part.get()}) {
    OnDevice<float> x(*comm, device, 8, 1);
    if (world.rank() == 1) std::this_thread::sleep_for(150ms);  // the watching thread of rank 0 looks meanwhile
    Work work = comm->all_reduce(x.view(), x.view(), ReduceOp::sum());
    std::thread([&] { work.wait(); }).join();
  }
  std::thread([&] { part.reset(); }).join();
  const Buffer window = copy->allocate_symmetric(std::size_t{4} << 20, MemoryKind::device, {});
}

/// The versions' windows and copy engines differ, so ranks would make different calls.
TEST(NcclDevices, VersionsThatDifferAreOneErrorOnAllRanks) {
  reset_fake();
  const auto bootstraps = make_thread_bootstraps(3, 20s);
  std::vector<std::future<std::string>> results;
  for (const auto& bootstrap : bootstraps)
    results.push_back(std::async(std::launch::async, [&, bootstrap] {
      comm::nccl::NcclApi api = fake_api();
      if (bootstrap->rank() == 1)
        api.ncclGetVersion = [](int* version) {
          *version = 22605;
          return ncclSuccess;
        };
      return error_of([&] { comm::nccl::make_world(bootstrap, quick_options(), api); });
    }));
  for (auto& result : results)
    EXPECT_THAT(result.get(),
                testing::MatchesRegex("InvalidUsage: init: NCCL's version differs between the ranks: it is "
                                      "2\\.26\\.5 on rank 1; .* on ranks 0, 2; choose the same on all ranks"));
}

TEST(NcclDevices, OnlyTheRanksOwnHasAContext) {
  reset_fake();
  EXPECT_EQ(run_on_devices(use_all), std::vector<std::string>(2));
  EXPECT_EQ(fake_counts().contexts, (std::set{1, 2}));
  EXPECT_TRUE(fake_counts().nothing_left());
  // Control: a thread that has chosen no device uses device 0.
  std::thread([] { fake_api().cudaFree(nullptr); }).join();
  EXPECT_EQ(fake_counts().contexts, (std::set{0, 1, 2}));
}

TEST(NcclDevices, AFailureCreatesNoOtherContext) {
  reset_fake();
  Buffer survivor;
  run_on_devices([&](Communicator& world, int device) {
    world.barrier().wait();
    OnDevice<float> x(world, device, 8, 1);
    if (world.rank() == 0) {
      Buffer memory = world.allocate(std::size_t{4} << 20, MemoryKind::device, {});
      survivor = std::move(memory);
      Work work = world.all_reduce(x.view(), x.view(), ReduceOp::sum());
      EXPECT_EQ(error_of([&] { work.wait(); }), "Aborted: rank 1 aborted: enough");
    } else {
      std::this_thread::sleep_for(150ms);
      world.abort("enough");
    }
  });
  std::thread([&] { survivor.reset(); }).join();
  EXPECT_TRUE(all_freed());
  EXPECT_EQ(fake_counts().contexts, (std::set{1, 2}));
}

/// The device that is current for a thread of the program after the calls, whose device was 3.
int device_after(bool has_context) {
  reset_fake();
  int device = -1;
  std::thread([&] {
    fake_api().cudaSetDevice(3);
    if (!has_context) reset_fake();
    comm::nccl::DeviceGuard(fake_api(), 1);
    fake_api().cudaGetDevice(&device);
  }).join();
  return device;
}

TEST(NcclDevices, TheProgramsDeviceStaysCurrentIfItHasAContext) {
  EXPECT_EQ(device_after(true), 3);
  EXPECT_EQ(fake_counts().contexts, (std::set{1, 3}));
  EXPECT_EQ(device_after(false), 1);
  EXPECT_EQ(fake_counts().contexts, (std::set{1}));
}

}  // namespace
}  // namespace tessera::nccl_test
