// Order between the program's streams and the communicator's stream, without the host. The fake's streams run only when
// a later event is queried; the watching thread, which also does that, is disabled.
#include "tests/backends/nccl/support.h"
#include "tests/harness/fault.h"

namespace tessera::nccl_test {
namespace {

BackendOptions unwatched() {
  BackendOptions options = quick_options();
  options.progress_thread = false;
  return options;
}

/// Fills on a device stream, all-reduces, and doubles on the stream, in the order that the dependencies allow.
std::vector<float> fill_reduce_double(Communicator& comm, bool after, bool wait_on) {
  FakeDeviceStream stream(comm.rank());
  OnDevice<float> x(comm, comm.rank(), 4, 100);
  OnDevice<float> y(comm, comm.rank(), 4, 0);
  stream.run([&] { std::fill_n(x.data(), 4, static_cast<float>(comm.rank() + 1)); });
  {
    Work work = comm.all_reduce(x.view(), y.view(), ReduceOp::sum(), {.after = after ? &stream : nullptr});
    if (wait_on) work.wait_on(stream);
    stream.run([&] {
      for (std::size_t i = 0; i < 4; ++i) y.data()[i] *= 2;
    });
    if (!wait_on) stream.synchronize();  // before the Work's destructor waits
  }
  stream.synchronize();
  return y.values();
}

TEST(NcclStreams, OperationsAreOrderedWithStreams) {
  reset_fake();
  run_ranks(
      3, [](Communicator& comm) { EXPECT_EQ(fill_reduce_double(comm, true, true), std::vector<float>(4, 12)); },
      unwatched());
}

/// Handle 0 means the stream of the current device: here the program's threads have device 0, and rank 1 works on
/// device 1.
TEST(NcclStreams, DefaultStreamsAreThoseOfTheirDevice) {
  reset_fake();
  run_ranks(
      2,
      [](Communicator& comm) {
        fake_api().cudaSetDevice(0);
        FakeDefaultStream stream(comm.rank());
        OnDevice<float> x(comm, comm.rank(), 4, 100);
        stream.run([&] { std::fill_n(x.data(), 4, static_cast<float>(comm.rank() + 1)); });
        {
          Work work = comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = &stream});
          work.wait_on(stream);
          stream.run([&] {
            for (std::size_t i = 0; i < 4; ++i) x.data()[i] *= 2;
          });
        }
        stream.synchronize();
        EXPECT_EQ(x.values(), std::vector<float>(4, 6));
        int current = -1;
        fake_api().cudaGetDevice(&current);
        EXPECT_EQ(current, 0);
      },
      unwatched());
}

TEST(NcclStreams, DetectsMissingDependency) {
  reset_fake();
  // The operation runs when it is waited for; nothing has made the stream run.
  EXPECT_EQ(run_world(3, unwatched(),
                      [](Communicator& comm) {
                        FakeDeviceStream stream(comm.rank());
                        OnDevice<float> x(comm, comm.rank(), 4, 100);
                        stream.run([&] { std::fill_n(x.data(), 4, 1.0F); });
                        comm.all_reduce(x.view(), x.view(), ReduceOp::sum()).wait();
                        EXPECT_EQ(x.values(), std::vector<float>(4, 300));
                        stream.synchronize();
                      }),
            std::vector<std::string>(3));
  run_ranks(
      3, [](Communicator& comm) { EXPECT_EQ(fill_reduce_double(comm, true, false), std::vector<float>(4, 6)); },
      unwatched());
}

TEST(NcclStreams, StreamWaitDoesNotBlockHost) {
  reset_fake();
  run_ranks(
      2,
      [](Communicator& comm) {
        FakeDeviceStream stream(comm.rank());
        OnDevice<float> x(comm, comm.rank(), 4, 1);
        OnDevice<float> never(comm, comm.rank(), 4, 1);
        comm.barrier().wait();
        if (comm.rank() == 0) {
          const std::uint64_t before = fake_counts().queries;
          const auto start = std::chrono::steady_clock::now();
          {
            Work work = comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = &stream});
            EXPECT_FALSE(work.done());  // rank 1 has not issued it
            work.wait_on(stream);
          }
          EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
          EXPECT_LE(fake_counts().queries - before, 4u);
          stream.synchronize();
        } else {
          std::this_thread::sleep_for(200ms);
          comm.all_reduce(x.view(), x.view(), ReduceOp::sum()).wait();
        }
        EXPECT_EQ(x.values(), std::vector<float>(4, 2));
      },
      unwatched());
}

TEST(NcclStreams, HostStreamWaitsOnHost) {
  reset_fake();
  run_ranks(
      2,
      [](Communicator& comm) {
        const auto lazy = make_lazy_stream();
        OnDevice<float> x(comm, comm.rank(), 4, 0);
        float seen = 0;
        lazy->run([&] { std::fill_n(x.data(), 4, 1.0F); });
        Work work = comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = lazy.get()});
        work.wait_on(*lazy);
        lazy->run([&] { seen = x.values()[0]; });
        lazy->synchronize();
        EXPECT_EQ(seen, 2);
        const auto immediate = make_immediate_stream();
        comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = immediate.get()}).wait_on(*immediate);
        EXPECT_EQ(x.values()[3], 4);
      },
      unwatched());
}

TEST(NcclStreams, DecoratorsKeepStreamOrder) {
  reset_fake();
  const CommunicatorDecorator decorate = [](auto world) {
    return harness::inject(std::move(world), {.kind = harness::FaultKind::drop, .call = 99});
  };
  EXPECT_EQ(run_world(
                3, unwatched(),
                [](Communicator& comm) { EXPECT_EQ(fill_reduce_double(comm, true, true), std::vector<float>(4, 12)); },
                fake_api(), decorate),
            std::vector<std::string>(3));
}

TEST(NcclStreams, EventsOrderTwoCommunicators) {
  reset_fake();
  run_ranks(
      2,
      [](Communicator& world) {
        const auto gather = world.split(0, world.rank());
        const auto reduce = world.split(0, world.rank());
        FakeDeviceStream stream(world.rank());
        OnDevice<float> part(world, world.rank(), 2, static_cast<float>(world.rank() + 1));
        OnDevice<float> whole(world, world.rank(), 4, 0);
        gather->all_gather(part.view(), whole.view()).wait_on(stream);
        stream.run([&] {
          for (std::size_t i = 0; i < 4; ++i) whole.data()[i] *= 10;
        });
        Work work = reduce->reduce_scatter(whole.view(), part.view(), ReduceOp::sum(), {.after = &stream});
        work.wait();
        EXPECT_EQ(part.values(), std::vector<float>(2, world.rank() == 0 ? 20 : 40));
      },
      unwatched());
}

}  // namespace
}  // namespace tessera::nccl_test
