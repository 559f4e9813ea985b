// Host data that ranks exchange over a communicator that accepts device memory only.
#include "tessera/comm/host_collectives.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "tessera/comm/init.h"
#include "tests/harness/guarded_device.h"

namespace tessera::comm {
namespace {

/// Runs `body` on two ranks of a device whose memory crashes the host that touches it.
void on_two_ranks(const std::function<void(base::DeviceRuntime&, comm::Communicator&)>& body) {
  const auto device = harness::make_guarded_device({.lazy = true});
  comm::InitOptions config;
  config.backend = "shm";
  config.device = device;
  comm::run_threads(2, config, [&](comm::Communicator& comm) { body(*device, comm); });
}

TEST(HostCollectives, ExchangeNumbersOverDevice) {
  on_two_ranks([](base::DeviceRuntime& device, comm::Communicator& comm) {
    HostCollectives control(comm, device);
    double loss = comm.rank() + 1.0;
    const comm::View view = comm::view_of(&loss, 1);
    bool on_device = false;
    control.exchange_through_device(view, view, [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
      on_device = in.device == device.device() && out.device == device.device();
      return comm.all_reduce(in, out, comm::ReduceOp::avg(), options);
    });
    EXPECT_TRUE(on_device);
    EXPECT_EQ(loss, 1.5);
  });
}

TEST(HostCollectives, ExchangeEmptyAndUnevenData) {
  on_two_ranks([](base::DeviceRuntime& device, comm::Communicator& comm) {
    HostCollectives control(comm, device);
    const std::vector<std::size_t> counts = {3, 0};
    const std::vector<std::uint8_t> mine(counts[static_cast<std::size_t>(comm.rank())], 7);
    std::vector<std::uint8_t> all(3, 0);
    control.exchange_through_device(comm::view_of(mine.data(), mine.size()), comm::view_of(all.data(), all.size()),
                                    [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
                                      return comm.all_gather_v(in, out, counts, options);
                                    });
    EXPECT_EQ(all, std::vector<std::uint8_t>(3, 7));
  });
}

/// False: timeout.
template <class Condition>
bool comes_true(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

/// Rank 1 starts after rank 0 has looked: before that, no data can have arrived.
TEST(HostCollectives, AsynchronousResultIsCompleteWhenDone) {
  std::atomic<bool> looked = false;
  on_two_ranks([&](base::DeviceRuntime& device, comm::Communicator& comm) {
    HostCollectives control(comm, device);
    double first = comm.rank() + 1.0, second = 10.0 * first;
    const auto sum = [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
      return comm.all_reduce(in, out, comm::ReduceOp::sum(), options);
    };
    if (comm.rank() == 1) {
      ASSERT_TRUE(comes_true([&] { return looked.load(); })) << "rank 0 did not look";
    }
    const auto one = control.begin_through_device(comm::view_of(&first, 1), comm::view_of(&first, 1), sum);
    if (comm.rank() == 0) {
      EXPECT_FALSE(one->done());
      EXPECT_EQ(first, 1.0);
      looked = true;
    }
    control.exchange_through_device(comm::view_of(&second, 1), comm::view_of(&second, 1), sum);
    EXPECT_EQ(second, 30);
    EXPECT_TRUE(one->done());  // it completed earlier
    EXPECT_EQ(first, 3);
  });
}

/// By then its buffer is used by another exchange.
TEST(HostCollectives, CompletedResultDoesNotChange) {
  on_two_ranks([](base::DeviceRuntime& device, comm::Communicator& comm) {
    HostCollectives control(comm, device);
    double first = 1, second = 10;
    const auto sum = [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
      return comm.all_reduce(in, out, comm::ReduceOp::sum(), options);
    };
    const auto one = control.begin_through_device(comm::view_of(&first, 1), comm::view_of(&first, 1), sum);
    ASSERT_TRUE(comes_true([&] { return one->done(); }));
    EXPECT_EQ(first, 2);
    first = 7;
    control.exchange_through_device(comm::view_of(&second, 1), comm::view_of(&second, 1), sum);
    EXPECT_TRUE(one->done());
    EXPECT_EQ(first, 7);
  });
}

TEST(HostCollectives, UseHostMemoryWhereSupported) {
  on_two_ranks([](base::DeviceRuntime& device, comm::Communicator& comm) {
    HostCollectives control(comm, device);
    const auto all = control.gather_all(std::vector<std::uint64_t>{static_cast<std::uint64_t>(comm.rank())});
    EXPECT_EQ(all, (std::vector<std::vector<std::uint64_t>>{{0}, {1}}));
    double value = 1;
    const comm::View view = comm::view_of(&value, 1);
    control.exchange(view, view, [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
      EXPECT_EQ(in.data, &value);
      return comm.all_reduce(in, out, comm::ReduceOp::sum(), options);
    });
    EXPECT_EQ(value, 2);
  });
}

}  // namespace
}  // namespace tessera::comm
