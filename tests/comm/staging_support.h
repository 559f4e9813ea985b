// Ranks that are threads with one device, whose memory is host memory that is accessible only while the device works: a
// backend that accessed it would crash. Its streams run only when a later event is polled or waited for.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/staging.h"
#include "tests/comm/support.h"
#include "tests/harness/guarded_device.h"

namespace tessera::comm_test {

inline StagingOptions small_chunks() { return {.chunk_bytes = 16 * 1024, .chunks_in_flight = 3}; }

inline std::shared_ptr<DeviceRuntime> lazy_device() { return harness::make_guarded_device({.lazy = true}); }

/// The paths of device memory: through host memory over a backend, or, with "ipc", from rank to rank.
inline constexpr const char* kStagingKinds[] = {"shm", "tcp", "ipc"};

inline void run_staged(const std::string& kind, int ranks, const std::shared_ptr<DeviceRuntime>& device,
                       const std::function<void(Communicator&)>& body, StagingOptions options = small_chunks()) {
  InitOptions config;
  config.backend = kind == "ipc" ? "shm" : kind;
  config.timeout = 60s;
  options.ipc = kind == "ipc";
  config.decorate = [&](auto world) { return stage(std::move(world), device, options); };
  run_threads(ranks, config, body);
}

/// Elements in device memory of the communicator, which a stream fills, changes and reads.
class Values {
 public:
  Values(Communicator& comm, DeviceRuntime& device, Stream& stream, std::size_t count, float value)
      : device_(device),
        stream_(stream),
        count_(count),
        memory_(comm.allocate(count * 4, MemoryKind::device, MemoryCategory::other)),
        data_(static_cast<float*>(memory_.data())) {
    fill(value);
  }
  ~Values() { stream_.synchronize(); }
  Values(const Values&) = delete;
  Values& operator=(const Values&) = delete;
  View view() const { return {data_, count_, DType::f32, device_.device()}; }
  void fill(float value) {
    stream_.run([data = data_, n = count_, value] { std::fill_n(data, n, value); });
  }
  void scale(float by) {
    stream_.run([data = data_, n = count_, by] { std::for_each(data, data + n, [by](float& x) { x *= by; }); });
  }
  std::vector<float> read() {
    std::vector<float> all(count_);
    device_.copy(stream_, CopyDirection::device_to_host, all.data(), data_, count_ * 4);
    stream_.synchronize();
    return all;
  }

 private:
  DeviceRuntime& device_;
  Stream& stream_;
  const std::size_t count_;
  const Buffer memory_;
  float* const data_;
};

}  // namespace tessera::comm_test
