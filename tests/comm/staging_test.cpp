// Device memory on the host's backends: results, order and counts.
#include <functional>
#include <future>

#include "tests/comm/staging_support.h"
#include "tests/conformance/cases.h"

namespace tessera::comm_test {
namespace {

class Staging : public testing::TestWithParam<const char*> {};

class StagedConformance : public testing::TestWithParam<std::tuple<const char*, OpKind, int>> {};

TEST_P(StagedConformance, IsBitwiseEqualToSerialReference) {
  const auto& [backend, kind, ranks] = GetParam();
  const auto device = lazy_device();
  std::vector<conformance::Case> cases = conformance::cases_for(kind, false, 7);
  std::erase_if(cases, [](const conformance::Case& c) { return c.count > 100'000; });  // more chunks, no new cases
  run_staged(backend, ranks, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    const conformance::OnDevice where{*device, *stream};
    for (const conformance::Case& c : cases) ASSERT_EQ(run_case(comm, c, &where), "");
  });
}
INSTANTIATE_TEST_SUITE_P(All, StagedConformance,
                         testing::Combine(testing::ValuesIn(kStagingKinds), testing::ValuesIn(conformance::all_kinds()),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& which) {
                           return std::string(std::get<0>(which.param)) + "_" +
                                  std::string(name_of(std::get<1>(which.param))) + "_" +
                                  std::to_string(std::get<2>(which.param));
                         });

/// One rank may stage while the others don't know: nothing is exchanged for it.
TEST(StagingAlone, IsLocalWithoutIpc) {
  const auto device = lazy_device();
  InitOptions config{.backend = "shm", .timeout = 20s};
  config.decorate = [&](std::unique_ptr<Communicator> world) {
    StagingOptions options = small_chunks();
    options.negotiates_ipc = false;
    return world->rank() == 0 ? stage(std::move(world), device, options) : std::move(world);
  };
  run_threads(2, config, [&](Communicator& comm) {
    float x = 1;
    comm.all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum()).wait();
    EXPECT_EQ(x, 2);
    if (comm.rank() == 1) return comm.send(view_of(&x, 1), 0).wait();
    int source = -1;
    comm.recv(view_of(&x, 1), kAnyRank, {.source = &source}).wait();  // host memory: as without staging
    EXPECT_EQ(source, 1);
    const auto stream = device->make_stream();
    const Values values(comm, *device, *stream, 4, 0);
    EXPECT_THROW(comm.recv(values.view(), kAnyRank), Unsupported);
  });
}

TEST_P(Staging, HostMemoryNeedsNoStaging) {
  const auto device = lazy_device();
  run_staged(GetParam(), 3, device, [](Communicator& comm) {
    for (const conformance::Behaviour& behaviour : conformance::behaviours())
      ASSERT_EQ(behaviour.run(comm), "") << behaviour.name;
  });
}

/// Fills, all-reduces and doubles, with or without the dependencies between the stream and the operation.
std::vector<float> fill_reduce_double(Communicator& comm, DeviceRuntime& device, bool after, bool wait_on,
                                      const std::function<void()>& doubled = {}) {
  const auto stream = device.make_stream();
  Values x(comm, device, *stream, 5000, 100);
  Values y(comm, device, *stream, 5000, 0);
  stream->synchronize();
  x.fill(static_cast<float>(comm.rank() + 1));
  comm.barrier().wait();
  {
    Work work = comm.all_reduce(x.view(), y.view(), ReduceOp::sum(), {.after = after ? stream.get() : nullptr});
    if (!after) work.wait();
    if (wait_on) work.wait_on(*stream);
    y.scale(2);
    if (!wait_on) {
      stream->synchronize();  // before the operation has written: a peer is late
      if (doubled) doubled();
      work.wait();
    }
  }
  return y.read();
}

TEST_P(Staging, OperationsAreOrderedWithStreams) {
  const auto device = lazy_device();
  run_staged(GetParam(), 3, device, [&](Communicator& comm) {
    EXPECT_EQ(fill_reduce_double(comm, *device, true, true), std::vector<float>(5000, 12));
  });
}

TEST_P(Staging, DetectsMissingDependency) {
  const auto device = lazy_device();
  run_staged(GetParam(), 3, device, [&](Communicator& comm) {
    // Nothing made the stream run before the copy read the memory.
    EXPECT_EQ(fill_reduce_double(comm, *device, false, true), std::vector<float>(5000, 600));
  });
  std::promise<void> doubled;
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    if (comm.rank() == 1) {
      const auto stream = device->make_stream();
      Values x(comm, *device, *stream, 5000, 2);
      comm.barrier().wait();
      EXPECT_EQ(doubled.get_future().wait_for(20s), std::future_status::ready);
      comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = stream.get()}).wait();
    } else {
      // It doubled the values from before the operation's write.
      EXPECT_EQ(fill_reduce_double(comm, *device, true, false, [&] { doubled.set_value(); }),
                std::vector<float>(5000, 3));
    }
  });
}

TEST_P(Staging, StreamWaitDoesNotBlockHost) {
  const auto device = lazy_device();
  std::promise<void> reported;
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 5000, 1);
    comm.barrier().wait();
    if (comm.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = stream.get()}).wait_on(*stream);
      const Event reached = stream->record();
      EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);  // a host that blocks does so until rank 1 times out
      EXPECT_FALSE(reached.done());                             // rank 1 has not issued it
      reported.set_value();
    } else {
      EXPECT_EQ(reported.get_future().wait_for(4s), std::future_status::ready);
      comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = stream.get()}).wait();
    }
    EXPECT_EQ(x.read(), std::vector<float>(5000, 2));
  });
}

/// Each operation of one communicator waits for a stream that waits for an operation of the other: work on the copy
/// streams must not block its own dependencies.
TEST_P(Staging, CrossDependentOperationsComplete) {
  const auto device = lazy_device();
  run_staged(GetParam(), 2, device, [&](Communicator& world) {
    const auto a = world.split(0, world.rank());
    const auto b = world.split(0, world.rank());
    const auto one = device->make_stream();
    const auto two = device->make_stream();
    Values x(world, *device, *one, 20'000, 1);
    one->synchronize();
    for (int round = 0; round < 4; ++round) {
      a->all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = two.get()}).wait_on(*one);
      x.scale(0.5F);
      b->all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = one.get()}).wait_on(*two);
      const int peer = 1 - world.rank();
      const std::vector<P2POp> parts = {P2POp::send(x.view(), peer)};
      if (world.rank() == 0) a->batch(parts, {.after = two.get()}).wait_on(*two);
      if (world.rank() == 1) a->recv(x.view(), peer, {.after = two.get()}).wait_on(*two);
    }
    two->synchronize();
    EXPECT_EQ(x.read(), std::vector<float>(20'000, 16));
  });
}

TEST_P(Staging, SupportsMessagesOverSplitOutOfOrder) {
  const auto device = lazy_device();
  run_staged(GetParam(), 2, device, [&](Communicator& world) {
    const auto stream = device->make_stream();
    const int peer = 1 - world.rank();
    Values given(world, *device, *stream, 50'000, static_cast<float>(world.rank() + 1));
    Values first(world, *device, *stream, 50'000, 0);
    Values second(world, *device, *stream, 7, 0);
    Values few(world, *device, *stream, 7, 9);
    stream->synchronize();
    Work one = world.recv(first.view(), peer);
    Work two = world.recv(second.view(), peer);
    const auto part = world.split(0, world.rank());  // the matching sends are issued after it
    Work three = world.send(given.view(), peer);
    std::vector<int> host = {world.rank(), world.rank()};
    Work sum = world.all_reduce(view_of(host.data(), 2), view_of(host.data(), 2), ReduceOp::sum());
    Work four = world.send(few.view(), peer);
    two.wait();
    sum.wait();
    one.wait();
    EXPECT_EQ(host, std::vector<int>(2, 1));
    EXPECT_EQ(first.read(), std::vector<float>(50'000, static_cast<float>(peer + 1)));
    EXPECT_EQ(second.read(), std::vector<float>(7, 9));
  });
}

TEST_P(Staging, SupportsPartsOfDifferentLengths) {
  const auto device = lazy_device();
  run_staged(GetParam(), 3, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    const std::vector<std::size_t> counts = {3000, 0, 5001};
    const auto me = static_cast<std::size_t>(comm.rank());
    const auto rank = static_cast<float>(comm.rank());
    Values part(comm, *device, *stream, counts[me], rank);
    Values whole(comm, *device, *stream, 8001, -1);
    comm.all_gather_v(part.view(), whole.view(), counts, {.after = stream.get()}).wait_on(*stream);
    std::vector<float> want(3000, 0);
    want.resize(8001, 2);
    EXPECT_EQ(whole.read(), want);
    comm.reduce_scatter_v(whole.view(), part.view(), counts, ReduceOp::sum(), {.after = stream.get()}).wait_on(*stream);
    EXPECT_EQ(part.read(), std::vector<float>(counts[me], 3 * rank));
    // Rank a sends rank b 1000 a + b elements.
    std::vector<std::size_t> to, from;
    for (std::size_t r = 0; r < 3; ++r) {
      to.push_back(1000 * me + r);
      from.push_back(1000 * r + me);
    }
    Values input(comm, *device, *stream, 3000 * me + 3, rank);
    Values output(comm, *device, *stream, 3000 + 3 * me, -1);
    comm.all_to_all_v(input.view(), to, output.view(), from, {.after = stream.get()}).wait_on(*stream);
    want.clear();
    for (std::size_t r = 0; r < 3; ++r) want.insert(want.end(), from[r], static_cast<float>(r));
    EXPECT_EQ(output.read(), want);
  });
}

TEST_P(Staging, ChunksCountAsOneCall) {
  const auto device = lazy_device();
  std::vector<TrafficStats> traffic[2];
  for (const bool small : {false, true}) {
    traffic[small].resize(3);
    const auto body = [&](Communicator& comm) {
      const auto stream = device->make_stream();
      Values whole(comm, *device, *stream, 3 * 4001, 1);
      Values part(comm, *device, *stream, 4001, 1);
      stream->synchronize();
      comm.all_reduce(part.view(), part.view(), ReduceOp::sum()).wait();
      comm.all_gather(part.view(), whole.view()).wait();
      comm.reduce_scatter(whole.view(), part.view(), ReduceOp::sum()).wait();
      comm.broadcast(whole.view(), whole.view(), 1).wait();
      comm.barrier().wait();
      traffic[small][static_cast<std::size_t>(comm.rank())] = comm.traffic();
    };
    run_staged(GetParam(), 3, device, body, small ? small_chunks() : StagingOptions{});
  }
  for (std::size_t r = 0; r < 3; ++r)
    for (const OpKind kind : {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter, OpKind::broadcast}) {
      EXPECT_EQ(traffic[1][r].of(kind).calls, 1u);
      EXPECT_EQ(traffic[1][r].of(kind).bytes_sent, traffic[0][r].of(kind).bytes_sent) << name_of(kind);
      EXPECT_EQ(traffic[1][r].bytes_to_peer, traffic[0][r].bytes_to_peer);
    }
}

/// Pinning memory takes longer than an operation.
TEST_P(Staging, RepeatedOperationsPinNoMemory) {
  const auto device = lazy_device();
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 30'000, 1);
    const auto operations = [&] {
      for (int i = 0; i < 4; ++i) comm.all_reduce(x.view(), x.view(), ReduceOp::max(), {.after = stream.get()}).wait();
    };
    operations();
    const harness::HostWaits before = harness::host_waits();
    operations();
    EXPECT_EQ((harness::host_waits() - before).memory, 0U);
  });
}

TEST_P(Staging, MemoryIsPinnedAndTracked) {
  const auto device = lazy_device();
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    const auto live = [&] { return comm.memory_tracker()->snapshot().now_of(MemoryCategory::parameter); };
    {
      const Buffer memory = comm.allocate(1 << 16, MemoryKind::device, MemoryCategory::parameter);
      EXPECT_EQ(live(), 1u << 16);
      const auto stream = device->make_stream();
      const View view{memory.data(), 1 << 14, DType::f32, device->device()};
      device->fill(*stream, memory.data(), 0, memory.bytes());
      comm.all_reduce(view, view, ReduceOp::sum(), {.after = stream.get()}).wait();
    }
    EXPECT_EQ(live(), 0u);
    std::vector<float> host(8);
    const View there{device->allocate(64), 8, DType::f32, device->device()};
    EXPECT_EQ(error_of([&] { comm.all_reduce(view_of(host.data(), 8), there, ReduceOp::sum()); }),
              "InvalidUsage: all_reduce: in is on cpu but out is on cuda:0");
    const View elsewhere{there.data, 8, DType::f32, {DeviceType::cuda, 3}};
    EXPECT_EQ(error_of([&] { comm.broadcast(elsewhere, elsewhere, 0); }),
              "InvalidUsage: broadcast: memory is on cuda:3, this communicator needs cuda:0");
    device->free(there.data, 64);
  });
}

INSTANTIATE_TEST_SUITE_P(All, Staging, testing::ValuesIn(kStagingKinds),
                         [](const auto& which) { return std::string(which.param); });

TEST(StagingConfig, RejectsDeviceMemoryWithoutDevice) {
  const auto device = lazy_device();
  float* const data = static_cast<float*>(device->allocate(64));
  const View there{data, 8, DType::f32, device->device()};
  InitOptions config = quick_config();
  run_threads(2, config, [&](Communicator& comm) {
    EXPECT_EQ(
        error_of([&] { comm.all_reduce(there, there, ReduceOp::sum()); }),
        "Unsupported: all_reduce: backend shm does not support memory of device cuda:0; pass the device to init() as "
        "InitOptions::device");
  });
  config.device = device;
  run_threads(1, config, [&](Communicator& comm) { comm.all_reduce(there, there, ReduceOp::sum()).wait(); });
  device->free(data, 64);
}

}  // namespace
}  // namespace tessera::comm_test
