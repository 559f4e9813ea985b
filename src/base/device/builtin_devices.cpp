// The devices that need no module.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "tessera/base/cores.h"
#include "tessera/base/device/module_loader.h"
#include "tessera/base/error.h"
#include "tessera/base/memory_pool.h"

namespace tessera::base {

namespace {

void* allocate_pages(std::size_t bytes) {
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  if (data == nullptr) throw system_error("memory: can't allocate " + std::to_string(bytes) + " bytes", ENOMEM);
  return data;
}

class CpuRuntime final : public DeviceRuntime {
 public:
  CpuRuntime() : DeviceRuntime({DeviceType::cpu, 0}, {.host_accessible = true}) {}

  DeviceProperties properties() const override {
    const auto pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return {.name = "host", .memory_bytes = pages * page, .processors = host_cores(), .generation = 0};
  }
  std::unique_ptr<Stream> make_stream() override { return make_immediate_stream(); }

  void* allocate(std::size_t bytes) override { return allocate_pages(bytes); }
  void free(void* data, std::size_t) noexcept override { std::free(data); }
  void* allocate_host(std::size_t bytes) override { return allocate_pages(bytes); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }

  void copy(Stream& stream, CopyDirection, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    stream.run([=] { std::memcpy(to, from, bytes); });
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    if (bytes == 0) return;
    stream.run([=] { std::memset(data, value, bytes); });
  }
  void synchronize() override {}
  const void* find(std::string_view) const noexcept override { return nullptr; }
};

/// Shapes without data. A program never has memory at its addresses, so accessing one crashes at once instead of
/// computing with garbage: x86-64 programs have addresses below 2^47 (2^56 where they ask for them), and those of arm64
/// have bit 55 clear and ignore the bits above it.
class MetaRuntime final : public DeviceRuntime {
 public:
  MetaRuntime() : DeviceRuntime({DeviceType::meta, 0}, {}) {}

  DeviceProperties properties() const override { return {.name = "shapes without data"}; }
  std::unique_ptr<Stream> make_stream() override { return make_immediate_stream(); }

  void* allocate(std::size_t bytes) override {
    const std::size_t step = bytes / kAlignment * kAlignment + kAlignment;
    const std::uintptr_t address = next_.fetch_add(step, std::memory_order_relaxed);
    return reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  void free(void*, std::size_t) noexcept override {}
  void* allocate_host(std::size_t bytes) override { return allocate_pages(bytes); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }

  void copy(Stream&, CopyDirection direction, void* to, const void*, std::size_t bytes) override {
    if (direction == CopyDirection::device_to_host && bytes > 0 && reinterpret_cast<std::uintptr_t>(to) < kFirst)
      throw InvalidUsage("copy: device meta holds shapes without data, so nothing can be read");
  }
  void fill(Stream&, void*, unsigned char, std::size_t) override {}
  void synchronize() override {}
  const void* find(std::string_view) const noexcept override { return nullptr; }

 private:
  static constexpr std::uintptr_t kFirst = std::uintptr_t{1} << 55;  // memory below has data
  std::atomic<std::uintptr_t> next_{kFirst};
};

}  // namespace

std::shared_ptr<DeviceRuntime> cpu_runtime() { return std::make_shared<CpuRuntime>(); }
std::shared_ptr<DeviceRuntime> meta_runtime() { return std::make_shared<MetaRuntime>(); }

}  // namespace tessera::base
