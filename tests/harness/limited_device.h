// A device whose memory is the host's and ends at a limit; it counts what it is asked for.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"

namespace tessera::test {

class LimitedDevice final : public base::DeviceRuntime {
 public:
  explicit LimitedDevice(std::size_t limit)
      : DeviceRuntime({base::DeviceType::cuda, 0}, {.host_accessible = true, .slow_allocation = true}), limit_(limit) {}

  base::DeviceProperties properties() const override { return described; }
  std::unique_ptr<base::Stream> make_stream() override { return base::make_immediate_stream(); }
  void wait_for_host_events() override { ++host_waits; }
  void* allocate(std::size_t bytes) override {
    waited_before_calls &= host_waits > 0;
    synchronized = false;  // what uses the memory comes later
    if (used + bytes > limit_)
      throw base::SystemError("limited: can't allocate " + std::to_string(bytes) + " bytes: out of memory");
    used += bytes;
    return std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  }
  void free(void* data, std::size_t bytes) noexcept override {
    waited_before_calls &= host_waits > 0;
    synchronized_before_frees &= synchronized;
    used -= bytes;
    std::free(data);
  }
  void* allocate_host(std::size_t bytes) override { return std::malloc(bytes); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }
  void copy(base::Stream&, base::CopyDirection, void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void fill(base::Stream&, void* data, unsigned char value, std::size_t bytes) override {
    std::memset(data, value, bytes);
  }
  void synchronize() override { synchronized = true; }
  const void* find(std::string_view) const noexcept override { return nullptr; }

  base::DeviceProperties described;
  std::size_t used = 0;
  int host_waits = 0;
  bool waited_before_calls = true;
  bool synchronized = false, synchronized_before_frees = true;

 private:
  const std::size_t limit_;
};

}  // namespace tessera::test
