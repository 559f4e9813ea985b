// Device memory that ranks of a host read from each other: when calls use this algorithm, what is counted, and that
// nothing is read, reused or freed too early. The cases of staging_test.cpp and the conformance suite check results and
// order.
#include <atomic>
#include <mutex>
#include <thread>

#include "tests/comm/staging_support.h"
#include "tests/conformance/cases.h"

namespace tessera::comm_test {
namespace {

using harness::GuardedOptions;
using harness::GuardedSharing;

std::shared_ptr<DeviceRuntime> guarded(GuardedOptions options) {
  options.lazy = true;
  return harness::make_guarded_device(options);
}

/// Each rank has its own device, as processes do: imported memory is another mapping.
void run_apart(const std::vector<std::shared_ptr<DeviceRuntime>>& devices,
               const std::function<void(Communicator&, DeviceRuntime&)>& body, InitOptions config = quick_config()) {
  std::atomic<int> next{0};
  std::vector<std::atomic<DeviceRuntime*>> of_rank(devices.size());
  config.decorate = [&](auto world) {
    const auto& device = devices[static_cast<std::size_t>(next++)];
    of_rank[static_cast<std::size_t>(world->rank())] = device.get();
    return stage(std::move(world), device, {.chunk_bytes = 16 * 1024});
  };
  run_threads(static_cast<int>(devices.size()), config,
              [&](Communicator& comm) { body(comm, *of_rank[static_cast<std::size_t>(comm.rank())]); });
}

std::vector<std::shared_ptr<DeviceRuntime>> devices(int count, GuardedOptions options = {}) {
  std::vector<std::shared_ptr<DeviceRuntime>> all;
  for (int i = 0; i < count; ++i) all.push_back(guarded(options));
  return all;
}

void expect_nothing_open(const std::vector<std::shared_ptr<DeviceRuntime>>& all) {
  for (const auto& device : all) {
    const GuardedSharing open = harness::sharing_of(*device);
    EXPECT_GT(open.imports, 0);
    EXPECT_EQ(open.exported, 0);
    EXPECT_EQ(open.imported, 0);
    EXPECT_EQ(open.freed_too_early, 0);
  }
}

/// Whether an all_reduce of the view, whose result must be right, used the ipc algorithm.
bool sums_by_ipc(Communicator& comm, DeviceRuntime& device, Stream& stream, View view) {
  stream.run([data = static_cast<float*>(view.data), n = view.count] { std::fill_n(data, n, 1.0F); });
  comm.all_reduce(view, view, ReduceOp::sum(), {.after = &stream}).wait();
  std::vector<float> read(view.count);
  device.copy(stream, CopyDirection::device_to_host, read.data(), view.data, read.size() * 4);
  stream.synchronize();
  EXPECT_EQ(read, std::vector<float>(view.count, static_cast<float>(comm.size())));
  return comm.last_algorithm() == "ipc";
}

class OtherMappings : public testing::TestWithParam<OpKind> {};

TEST_P(OtherMappings, AreBitwiseEqualToSerialReference) {
  std::vector<conformance::Case> cases = conformance::cases_for(GetParam(), false, 11);
  std::erase_if(cases, [](const conformance::Case& c) { return c.count > 100'000; });
  const auto all = devices(3);
  run_apart(all, [&](Communicator& comm, DeviceRuntime& device) {
    const auto stream = device.make_stream();
    const conformance::OnDevice where{device, *stream};
    for (const conformance::Case& c : cases) ASSERT_EQ(run_case(comm, c, &where), "");
  });
  for (const auto& device : all) {
    const GuardedSharing open = harness::sharing_of(*device);
    EXPECT_EQ(open.exported + open.imported + open.freed_too_early, 0);
  }
}
INSTANTIATE_TEST_SUITE_P(Each, OtherMappings, testing::ValuesIn(conformance::all_kinds()),
                         [](const auto& which) { return std::string(name_of(which.param)); });

TEST(DeviceIpc, IsUsedWhereAllMemoryIsInWindows) {
  const auto all = devices(3);
  run_apart(all, [&](Communicator& comm, DeviceRuntime& device) {
    const auto stream = device.make_stream();
    Values window(comm, device, *stream, 5000, 0);
    void* const plain = device.allocate(5000 * 4);
    const View ordinary{plain, 5000, DType::f32, device.device()};
    EXPECT_TRUE(sums_by_ipc(comm, device, *stream, window.view()));
    EXPECT_FALSE(sums_by_ipc(comm, device, *stream, ordinary));
    for (int odd = 0; odd < comm.size(); ++odd)
      EXPECT_FALSE(sums_by_ipc(comm, device, *stream, comm.rank() == odd ? ordinary : window.view()));
    EXPECT_TRUE(sums_by_ipc(comm, device, *stream, window.view()));
    // Only memory that peers read has to be a window.
    const View mine{plain, 1, DType::f32, device.device()};
    const View everybodys{plain, 3, DType::f32, device.device()};
    comm.all_gather({window.view().data, 1, DType::f32, device.device()}, everybodys).wait();
    EXPECT_EQ(comm.last_algorithm(), "ipc");
    comm.all_gather(mine, {window.view().data, 3, DType::f32, device.device()}).wait();
    EXPECT_NE(comm.last_algorithm(), "ipc");
    // Each split communicator uses another part of it, at another offset on every rank.
    const auto pair = comm.split(comm.rank() == 1 ? -1 : 0, -comm.rank());
    if (pair != nullptr) {
      auto* const data = static_cast<float*>(window.view().data) + 100 * (comm.rank() + 1);
      EXPECT_TRUE(sums_by_ipc(*pair, device, *stream, {data, 1001, DType::f32, device.device()}));
    }
    stream->synchronize();
    device.free(plain, 5000 * 4);
  });
  expect_nothing_open(all);
}

TEST(DeviceIpc, IsUnusedIfDisabledOrOtherAlgorithmIsSet) {
  const auto ipc_with = [](StagingOptions options, const char* algorithms = "") {
    InitOptions config = quick_config();
    config.algorithms = algorithms;
    options.algorithms = algorithms;
    const auto device = lazy_device();
    config.decorate = [&](auto world) { return stage(std::move(world), device, options); };
    bool ipc = false;
    run_threads(2, config, [&](Communicator& comm) {
      const auto stream = device->make_stream();
      Values window(comm, *device, *stream, 1000, 0);
      const bool mine = sums_by_ipc(comm, *device, *stream, window.view());
      if (comm.rank() == 0) ipc = mine;
    });
    return ipc;
  };
  EXPECT_TRUE(ipc_with({}));
  EXPECT_FALSE(ipc_with({.ipc = false}));
  EXPECT_TRUE(ipc_with({}, "all_reduce=direct"));
  EXPECT_FALSE(ipc_with({}, "all_reduce=symmetric"));
  EXPECT_TRUE(ipc_with({}, "all_reduce=symmetric:0-1K;direct:1K-max"));
}

TEST(DeviceIpc, FallsBackToStagingOnAllRanks) {
  for (const GuardedOptions& other :
       {GuardedOptions{.refuses_imports = true}, GuardedOptions{.shares_memory = false}}) {
    auto all = devices(3);
    all[1] = guarded(other);
    std::mutex mutex;
    std::vector<std::string> said;
    InitOptions config = quick_config();
    config.logger = std::make_shared<Logger>(LogLevel::warn, [&](LogLevel, std::string_view text) {
      const std::lock_guard lock(mutex);
      said.emplace_back(text);
    });
    run_apart(
        all,
        [&](Communicator& comm, DeviceRuntime& device) {
          const auto stream = device.make_stream();
          Values window(comm, device, *stream, 5000, 0);
          for (int round = 0; round < 2; ++round) EXPECT_FALSE(sums_by_ipc(comm, device, *stream, window.view()));
        },
        config);
    if (!other.shares_memory) continue;
    EXPECT_EQ(
        said,
        std::vector<std::string>{
            "memory of cuda:0 moves through pinned host memory, not by IPC: the guarded device opens nobody's memory"});
  }
}

TEST(DeviceIpc, TrafficEqualsFormulas) {
  constexpr std::size_t kCount = 12'003;
  const auto device = lazy_device();
  run_staged("ipc", 3, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values a(comm, *device, *stream, kCount, 1);
    Values b(comm, *device, *stream, kCount, 1);
    const View whole = b.view();
    const View part{b.view().data, kCount / 3, DType::f32, whole.device};
    stream->synchronize();
    comm.all_reduce(a.view(), a.view(), ReduceOp::sum()).wait();
    comm.all_gather({a.view().data, kCount / 3, DType::f32, whole.device}, whole).wait();
    comm.reduce_scatter(a.view(), part, ReduceOp::sum()).wait();
    comm.broadcast(a.view(), a.view(), 1).wait();
    comm.reduce(a.view(), b.view(), ReduceOp::sum(), 2).wait();
    comm.gather({a.view().data, kCount / 3, DType::f32, whole.device}, whole, 0).wait();
    comm.scatter(a.view(), part, 1).wait();
    comm.all_to_all(a.view(), b.view()).wait();
    EXPECT_EQ(comm.last_algorithm(), "ipc");
    const TrafficStats traffic = comm.traffic();
    const std::pair<OpKind, int> called[] = {
        {OpKind::all_reduce, 0}, {OpKind::all_gather, 0}, {OpKind::reduce_scatter, 0}, {OpKind::broadcast, 1},
        {OpKind::reduce, 2},     {OpKind::gather, 0},     {OpKind::scatter, 1},        {OpKind::all_to_all, 0}};
    std::vector<std::uint64_t> to_peer(3);
    for (const auto& [kind, root] : called) {
      EXPECT_EQ(traffic.of(kind).calls, 1U);
      EXPECT_EQ(traffic.of(kind).bytes_sent, direct_bytes_sent(kind, kCount, 4, 3, comm.rank(), root)) << name_of(kind);
      for (int r = 0; r < 3; ++r)
        if (r != comm.rank())
          to_peer[static_cast<std::size_t>(r)] +=
              direct_bytes_to(kind, kCount, 4, {.ranks = 3, .rank = comm.rank(), .peer = r, .root = root});
    }
    EXPECT_EQ(traffic.bytes_to_peer, to_peer);
    EXPECT_EQ(traffic.of(OpKind::barrier).calls, 0U);
  });
}

TEST(DeviceIpc, DifferentCallIsMismatchOnAllRanks) {
  for (const bool same_size : {false, true}) {
    const auto device = lazy_device();
    run_staged("ipc", 2, device, [&](Communicator& comm) {
      const auto stream = device->make_stream();
      Values x(comm, *device, *stream, 100, 1);
      stream->synchronize();
      const auto one = static_cast<std::size_t>(same_size ? 8 : comm.rank() + 7);
      const View view{x.view().data, one, DType::f32, device->device()};
      const ReduceOp op = same_size && comm.rank() == 1 ? ReduceOp::max() : ReduceOp::sum();
      const std::string error = error_of([&] { comm.all_reduce(view, view, op).wait(); });
      EXPECT_TRUE(error.find("called a different operation than rank") != std::string::npos) << error;
      EXPECT_NE(error_of([&] { comm.barrier().wait(); }), "");
    });
  }
}

/// Rank 0 gathers and then overwrites its input, or frees it so that another buffer overwrites it; rank 1's copies are
/// slow. Returns the value that rank 1 received.
float gathered_from_a_changing_rank(bool wait, bool free) {
  std::vector<std::shared_ptr<DeviceRuntime>> all = devices(1);
  all.push_back(guarded({.slow_copies = 300ms}));
  float got = 0;
  run_apart(all, [&](Communicator& comm, DeviceRuntime& device) {
    const bool exports = harness::sharing_of(device).imports == 0 && &device == all[0].get();
    const auto stream = device.make_stream();
    auto given = std::make_unique<Values>(comm, device, *stream, 5000, exports ? 1.0F : 2.0F);
    Values all_of(comm, device, *stream, 10'000, 0);
    Work work = comm.all_gather(given->view(), all_of.view(), {.after = stream.get()});
    if (!exports) {
      work.wait();
      got = all_of.read()[comm.rank() == 0 ? 5000 : 0];
      return;
    }
    if (wait) {
      work.wait();
    } else {
      // Handles have been exchanged, and rank 1 has imported our memory but not copied yet.
      const auto until = std::chrono::steady_clock::now() + 20s;
      while (harness::sharing_of(*all[1]).imports == 0 && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(100us);
    }
    if (free) {
      const void* const before = given->view().data;
      given.reset();
      Values next(comm, device, *stream, 5000, 9);
      EXPECT_EQ(next.view().data, before);
      stream->synchronize();
    } else {
      given->fill(9);
      stream->synchronize();
    }
    work.wait();
  });
  return got;
}

TEST(DeviceIpc, CompletedCallIsNotRead) {
  EXPECT_EQ(gathered_from_a_changing_rank(true, false), 1);
  EXPECT_EQ(gathered_from_a_changing_rank(true, true), 1);
}

// Negative control: without the wait, the change reaches a slow peer.
TEST(DeviceIpc, DetectsReadOfIncompleteCall) {
  EXPECT_EQ(gathered_from_a_changing_rank(false, false), 9);
  EXPECT_EQ(gathered_from_a_changing_rank(false, true), 9);
}

TEST(DeviceIpc, BuffersMayOutliveWorld) {
  const auto all = devices(2);
  std::mutex mutex;
  std::vector<Buffer> kept;
  run_apart(all, [&](Communicator& comm, DeviceRuntime& device) {
    const auto stream = device.make_stream();
    Buffer memory = comm.allocate(1000 * 4, MemoryKind::device, std::nullopt);
    EXPECT_TRUE(sums_by_ipc(comm, device, *stream, {memory.data(), 1000, DType::f32, device.device()}));
    const std::lock_guard lock(mutex);
    kept.push_back(std::move(memory));
  });
  for (const auto& device : all) EXPECT_EQ(harness::sharing_of(*device).exported, 1);
  kept.clear();
  expect_nothing_open(all);
}

// Negative control of the guarded device's checks that the tests above rely on.
TEST(DeviceIpc, DetectsMemoryFreedDuringRead) {
  const auto all = devices(2);
  void* const data = all[0]->allocate(5000);
  void* const seen = all[1]->open_ipc_handle(all[0]->get_ipc_handle(data, 5000));
  EXPECT_NE(seen, data);
  EXPECT_DEATH(*static_cast<volatile char*>(seen) = 1, "");
  const auto writer = all[0]->make_stream();
  const auto reader = all[1]->make_stream();
  all[0]->fill(*writer, data, 7, 5000);
  writer->synchronize();
  char read = 0;
  all[1]->copy(*reader, CopyDirection::device_to_host, &read, static_cast<char*>(seen) + 4999, 1);
  reader->synchronize();
  EXPECT_EQ(read, 7);
  all[0]->free(data, 5000);
  EXPECT_EQ(harness::sharing_of(*all[0]).freed_too_early, 1);
  all[1]->close_ipc_handle(seen);
  EXPECT_EQ(harness::sharing_of(*all[1]).imported, 0);
}

}  // namespace
}  // namespace tessera::comm_test
