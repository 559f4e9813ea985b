// Ranks that are threads with one device that is memory of the host, closed but while the device works: a backend that
// touched it would crash. Its streams run only when somebody asks for what is behind.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tessera/comm/staging.h"
#include "tests/comm/support.h"
#include "tests/harness/guarded_device.h"

namespace tessera::comm_test {

inline constexpr StagingOptions kSmallChunks{.chunk_bytes = 16 * 1024, .chunks_in_flight = 3};

inline std::shared_ptr<DeviceRuntime> lazy_device() { return harness::make_guarded_device({.lazy = true}); }

inline void run_staged(const char* backend, int ranks, const std::shared_ptr<DeviceRuntime>& device,
                       const std::function<void(Communicator&)>& body, StagingOptions options = kSmallChunks) {
  Config config;
  config.backend = backend;
  config.timeout = 60s;
  config.decorate = [&](auto world) { return stage(std::move(world), device, options); };
  run_threads(ranks, config, body);
}

/// Elements of the device, which a stream fills, changes and reads.
class Values {
 public:
  Values(DeviceRuntime& device, Stream& stream, std::size_t count, float value)
      : device_(device), stream_(stream), count_(count), data_(static_cast<float*>(device.allocate(count * 4))) {
    fill(value);
  }
  ~Values() {
    stream_.synchronize();
    device_.free(data_, count_ * 4);
  }
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
  float* const data_;
};

}  // namespace tessera::comm_test
