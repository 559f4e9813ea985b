// What the CUDA device asks of CUDA, by a fake of its functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "tessera/base/cuda/runtime.h"
#include "tessera/base/error.h"
#include "tests/base/fake_cudart.h"

namespace tessera::base_test {
namespace {

using namespace tessera::base;  // NOLINT(google-build-using-namespace): the namespace under test

std::shared_ptr<DeviceRuntime> open_fake(int index = 0) {
  fake_cuda() = {};
  return cuda::open(index, [](std::string_view) noexcept -> const void* { return nullptr; });
}

std::ptrdiff_t timed_events() {
  const auto& flags = fake_cuda().event_flags;
  return std::count_if(flags.begin(), flags.end(), [](unsigned one) { return (one & cudaEventDisableTiming) == 0; });
}

TEST(CudaRuntime, EventsHaveTimesOnlyWhereAsked) {
  const auto device = open_fake();
  const auto stream = device->make_stream();
  const std::ptrdiff_t references = timed_events();  // a stream needs one to compare times with
  EXPECT_EQ(references, 1);
  const Event plain = stream->record();
  EXPECT_EQ(timed_events(), references);
  EXPECT_THROW(plain.time_ns(), InvalidUsage);
  const Event begin = stream->record_timed();
  const Event end = stream->record_timed();
  EXPECT_EQ(timed_events(), references + 2);
  EXPECT_GT(begin.time_ns(), 0);
  EXPECT_GE(end.time_ns(), begin.time_ns());
}

TEST(CudaRuntime, BorrowedStreamsStayTheirOwners) {
  const auto device = open_fake();
  const auto own = device->make_stream();
  void* const handle = dynamic_cast<DeviceStream&>(*own).native();
  const int destroyed = fake_cuda().streams_destroyed;
  {
    const auto borrowed = device->borrow_stream(handle);
    EXPECT_EQ(dynamic_cast<DeviceStream&>(*borrowed).native(), handle);
    EXPECT_EQ(fake_cuda().stream_flags.size(), 1U) << "it has made a stream";
    borrowed->record().wait();
    EXPECT_GT(borrowed->record_timed().time_ns(), 0);
  }
  EXPECT_EQ(fake_cuda().streams_destroyed, destroyed);
  own->record().wait();
}

TEST(CudaRuntime, EventsAreReused) {
  const auto device = open_fake();
  {
    const auto stream = device->make_stream();
    for (int i = 0; i < 100; ++i) {
      stream->record().wait();
      stream->record_timed().time_ns();
    }
    EXPECT_EQ(fake_cuda().events, 3);  // plain, timed, and the stream's reference
  }
}

/// A word only increases and serves one event after the other: a stream that comes late sees a later number.
TEST(CudaRuntime, StreamsWaitForANumberOrALaterOne) {
  const auto device = open_fake();
  const auto stream = device->make_stream();
  const auto signal = device->make_signal();
  const Event first = signal->arm();
  stream->wait(first);
  signal->set();
  EXPECT_TRUE(first.done());
  const Event second = signal->arm();
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(second.done());
  stream->wait(second);
  signal->set();
  EXPECT_TRUE(second.done());
  stream->wait(second);  // it is set: no wait
  const FakeCuda& fake = fake_cuda();
  EXPECT_EQ(fake.wait_flags, (std::vector<unsigned>{CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WAIT_VALUE_GEQ}));
  ASSERT_EQ(fake.wait_values.size(), 2U);
  EXPECT_EQ(fake.wait_values[1], fake.wait_values[0] + 1);
}

TEST(CudaRuntime, SignalIsSetAtItsEnd) {
  const auto device = open_fake();
  Event never;
  {
    const auto signal = device->make_signal();
    never = signal->arm();
    EXPECT_FALSE(never.done());
  }
  EXPECT_TRUE(never.done());
}

/// Pools may allocate meanwhile, in any thread, which CUDA forbids in its other modes.
TEST(CudaRuntime, CapturesAreRelaxed) {
  const auto device = open_fake();
  const auto stream = device->make_stream();
  device->begin_capture(*stream);
  device->free(device->allocate(64), 64);
  device->end_capture(*stream)->launch(*stream);
  EXPECT_EQ(fake_cuda().modes, std::vector{cudaStreamCaptureModeRelaxed});
}

TEST(CudaRuntime, StreamsDoNotWaitForTheDefaultStream) {
  const auto device = open_fake();
  const auto compute = device->make_stream();
  const auto copies = device->make_copy_stream();
  EXPECT_EQ(fake_cuda().stream_flags, (std::vector<unsigned>{cudaStreamNonBlocking, cudaStreamNonBlocking}));
}

/// Within a process there is nothing to map: the address is what was shared, and it is not closed.
TEST(CudaRuntime, MemoryOfTheSameProcessIsItsAddress) {
  const auto device = open_fake();
  void* const data = device->allocate(64);
  const IpcMemoryHandle handle = device->get_ipc_handle(data, 64);
  EXPECT_EQ(device->open_ipc_handle(handle), data);
  device->close_ipc_handle(data);
  device->free(data, 64);
}

/// Runs `use` in a thread that has not chosen a device.
void in_new_thread(const std::function<void()>& use) { std::thread(use).join(); }

TEST(CudaRuntime, UsesNoOtherDevice) {
  in_new_thread([] {
    auto device = open_fake(1);
    auto stream = device->make_stream(), later = device->make_copy_stream();
    auto signal = device->make_signal();
    Event event = stream->record(), timed = stream->record_timed(), set = signal->arm();
    void *const data = device->allocate(64), *const host = device->allocate_host(64);
    std::vector<char> pinned(64);
    device->pin_host(pinned.data(), 64);
    in_new_thread([&] {
      EXPECT_TRUE(event.done());
      event.wait();
      EXPECT_GT(timed.time_ns(), 0);
    });
    in_new_thread([&] { later->wait(event); });
    in_new_thread([&] { signal->set(); });
    in_new_thread([&] { later->wait(set); });
    in_new_thread([&] { device->unpin_host(pinned.data(), 64); });
    in_new_thread([&] { device->free_host(host, 64); });
    in_new_thread([&] { device->free(data, 64); });
    in_new_thread([&] {
      event = timed = set = {};
      signal = nullptr;
      stream.reset(), later.reset();
      device.reset();
    });
  });
  EXPECT_EQ(fake_cuda().contexts, std::set<int>{1});
  // The control: a call in a thread that has not chosen a device creates a context on the first one.
  in_new_thread([] { cudaDeviceSynchronize(); });
  EXPECT_EQ(fake_cuda().contexts, (std::set<int>{0, 1}));
}

TEST(CudaRuntime, LeavesTheCurrentDeviceOfAProgramThatHasOne) {
  in_new_thread([] {
    const auto device = open_fake(1);
    const auto stream = device->make_stream();
    cudaSetDevice(0);
    const Event event = stream->record();
    EXPECT_TRUE(event.done());
    device->free(device->allocate(64), 64);
    int current = -1;
    cudaGetDevice(&current);
    EXPECT_EQ(current, 0);
    // Work that the caller appends needs the stream's device.
    dynamic_cast<DeviceStream&>(*stream).prepare_launch();
    cudaGetDevice(&current);
    EXPECT_EQ(current, 1);
  });
}

}  // namespace
}  // namespace tessera::base_test
