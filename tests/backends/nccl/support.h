// Helpers that the tests of this backend share: ranks that are threads over the fake, memory and streams of its
// devices.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/nccl_group.h"
#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
#include "tessera/comm/init.h"
#include "tests/backends/nccl/fake_nccl.h"

namespace tessera::nccl_test {

using namespace tessera::base;
using namespace tessera::comm;
using namespace std::chrono_literals;

inline BackendOptions quick_options() {
  BackendOptions options;
  options.communicator.timeout = 20s;
  options.deterministic = false;
  return options;
}

/// The error that `call` throws, as "Kind: text"; "" if none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
  return "";
}

/// Runs `body` on every rank; returns the error of each rank in the format of error_of.
inline std::vector<std::string> run_world(int ranks, const BackendOptions& options,
                                          const std::function<void(Communicator&)>& body,
                                          const comm::nccl::NcclApi& api = fake_api(),
                                          const CommunicatorDecorator& decorate = {}) {
  const auto bootstraps = make_thread_bootstraps(ranks, options.communicator.timeout);
  std::vector<std::future<std::string>> results;
  for (const auto& bootstrap : bootstraps)
    results.push_back(std::async(std::launch::async, [&, bootstrap] {
      return error_of([&] {
        std::unique_ptr<Communicator> world = comm::nccl::make_world(bootstrap, options, api);
        if (decorate) world = decorate(std::move(world));
        body(*world);
      });
    }));
  std::vector<std::string> errors;
  for (auto& result : results) errors.push_back(result.get());
  return errors;
}

/// Whether nothing is left of the fake's objects, soon: a call that a failure has ended returns after its caller.
inline bool all_freed() {
  for (int i = 0; i < 200 && !fake_counts().nothing_left(); ++i) std::this_thread::sleep_for(10ms);
  return fake_counts().nothing_left();
}

/// The same for bodies that succeed on every rank; also checks that the fake has no complaint and nothing leaks.
inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body,
                      const BackendOptions& options = quick_options(), const comm::nccl::NcclApi& api = fake_api()) {
  EXPECT_EQ(run_world(ranks, options, body, api), std::vector<std::string>(static_cast<std::size_t>(ranks)));
  const FakeCounts counts = fake_counts();
  EXPECT_EQ(counts.complaint, "");
  EXPECT_TRUE(counts.nothing_left()) << counts.communicators << " communicators, " << counts.streams << " streams, "
                                     << counts.events << " events, " << counts.blocks << " blocks, "
                                     << counts.registrations << " registrations, " << counts.reduce_ops << " ops";
}

/// An environment variable in a scope.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* const name_;
};

/// A lazy stream of the fake. Its work consists of host functions.
class FakeDeviceStream final : public DeviceStream {
 public:
  explicit FakeDeviceStream(int device);
  ~FakeDeviceStream() override;
  void* native() const noexcept override { return stream_; }
  Event record() override;
  void wait(const Event& event) override;

 protected:
  void enqueue(std::function<void()> work) override;

 private:
  cudaStream_t stream_ = nullptr;
};

/// The default stream of a device, whose handle is 0, as a program's framework has it. Its calls make the device
/// current and restore the caller's.
class FakeDefaultStream final : public DeviceStream {
 public:
  explicit FakeDefaultStream(int device) : DeviceStream({DeviceType::cuda, device}, false) {}
  void* native() const noexcept override { return nullptr; }
  Event record() override;
  void wait(const Event& event) override;

 protected:
  void enqueue(std::function<void()> work) override;
};

/// `count` elements of a device; the fake's memory is readable by the host. In these worlds rank r works on device r.
template <class T>
class OnDevice {
 public:
  OnDevice(Communicator& comm, int device, std::size_t count, T value = T{})
      : device_(device), count_(count), memory_(comm.allocate(count * sizeof(T), MemoryKind::device, {})) {
    std::fill_n(data(), count, value);
  }
  T* data() { return static_cast<T*>(memory_.data()); }
  View view() { return view(0, count_); }
  View view(std::size_t offset, std::size_t count) {
    return {data() + offset, count, dtype_of<T>, {DeviceType::cuda, device_}};
  }
  std::vector<T> values() { return {data(), data() + count_}; }

 private:
  int device_;
  std::size_t count_;
  Buffer memory_;
};

}  // namespace tessera::nccl_test
