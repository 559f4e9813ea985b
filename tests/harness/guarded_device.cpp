#include "tests/harness/guarded_device.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tests/harness/guarded_streams.h"

namespace tessera::harness {
namespace {

using namespace base;  // NOLINT: this file implements a class of base

void append_sum(Stream& stream, const comm::DeviceReduceArgs& sum) {
  const auto count = static_cast<std::size_t>(sum.source_count);
  stream.run([sum, sources = std::vector<const void*>(sum.sources, sum.sources + count),
              factors = std::vector<double>(sum.factors, sum.factors + count)] {
    comm::reduce_tree(sum.op, sum.dtype, sources, factors, sum.out, sum.count);
  });
}
constexpr comm::DeviceReduceKernels kHostSums{append_sum};

Ranges& ranges_of_this_thread() {
  thread_local Ranges ranges;
  return ranges;
}

class GuardedGraph final : public Graph {
 public:
  explicit GuardedGraph(CapturingStream::Works works)
      : works_(std::make_shared<const CapturingStream::Works>(std::move(works))) {}
  void launch(Stream& stream) override {
    for (std::size_t i = 0; i < works_->size(); ++i) stream.run([works = works_, i] { (*works)[i](); });
  }

 private:
  const std::shared_ptr<const CapturingStream::Works> works_;
};

class GuardedRuntime final : public DeviceRuntime {
 public:
  explicit GuardedRuntime(GuardedOptions options)
      : DeviceRuntime({DeviceType::cuda, 0},
                      {.host_accessible = false, .slow_allocation = true, .shares_memory = options.shares_memory}),
        entry_{options.kernels != nullptr ? options.kernels : nn::make_host_kernels},
        options_(options) {}

  DeviceProperties properties() const override {
    return {.name = "guarded memory of the host", .memory_bytes = Arena::kBytes};
  }
  std::unique_ptr<Stream> make_stream() override {
    if (options_.lazy) return make_lazy_guarded_stream(device(), shared_, false);
    return make_guarded_stream(device(), shared_);
  }
  std::unique_ptr<Stream> make_copy_stream() override {
    if (!options_.lazy) return make_stream();
    return make_lazy_guarded_stream(device(), shared_, copy_streams_++ == options_.deaf_copy_stream);
  }

  void* allocate(std::size_t bytes) override {
    const std::lock_guard lock(shared_->mutex);
    ++waits_of_this_thread().memory;
    return shared_->arena.allocate(bytes);
  }
  void free(void* data, std::size_t bytes) noexcept override {
    const std::lock_guard lock(shared_->mutex);
    ++waits_of_this_thread().memory;
    shared_->arena.deallocate(data, bytes);
  }
  IpcMemoryHandle get_ipc_handle(void* data, std::size_t bytes) override {
    if (!options_.shares_memory) return DeviceRuntime::get_ipc_handle(data, bytes);
    const std::lock_guard lock(shared_->mutex);
    return shared_->arena.share(data, bytes);
  }
  void* open_ipc_handle(const IpcMemoryHandle& handle) override {
    if (options_.refuses_imports) throw Unsupported("the guarded device opens nobody's memory");
    const std::lock_guard lock(shared_->mutex);
    return shared_->arena.import(handle);
  }
  void close_ipc_handle(void* imported) noexcept override {
    const std::lock_guard lock(shared_->mutex);
    shared_->arena.release(imported);
  }
  GuardedSharing sharing() const {
    const std::lock_guard lock(shared_->mutex);
    return shared_->arena.sharing();
  }

  void* allocate_host(std::size_t bytes) override {
    void* const data = std::malloc(bytes);
    pin_host(data, bytes);
    return data;
  }
  void free_host(void* data, std::size_t bytes) noexcept override {
    unpin_host(data, bytes);
    std::free(data);
  }
  void pin_host(void* data, std::size_t bytes) override {
    ++waits_of_this_thread().memory;
    const std::lock_guard lock(shared_->mutex);
    shared_->pinned.add(data, bytes);
  }
  void unpin_host(void* data, std::size_t) noexcept override {
    ++waits_of_this_thread().memory;
    const std::lock_guard lock(shared_->mutex);
    shared_->pinned.remove(data);
  }

  void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) override {
    if (direction != CopyDirection::device_to_device) {
      const std::lock_guard lock(shared_->mutex);
      const void* const host = direction == CopyDirection::host_to_device ? from : to;
      if (!shared_->pinned.holds(host, bytes)) ++waits_of_this_thread().copies;
    }
    if (direction == CopyDirection::device_to_device && options_.slow_copies.count() > 0)
      delay_guarded_stream(stream, options_.slow_copies);
    if (bytes > 0) stream.run([=] { std::memcpy(to, from, bytes); });
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    stream.run([=] { std::memset(data, value, bytes); });
  }
  void synchronize() override { ++waits_of_this_thread().events; }
  void begin_capture(Stream& stream) override { dynamic_cast<CapturingStream&>(stream).begin_capture(); }
  std::unique_ptr<Graph> end_capture(Stream& stream) override {
    return std::make_unique<GuardedGraph>(dynamic_cast<CapturingStream&>(stream).end_capture());
  }
  void range_begin(std::string_view what, std::string_view unit) noexcept override {
    Ranges& ranges = ranges_of_this_thread();
    std::string indent(2 * static_cast<std::size_t>(std::max(ranges.open++, 0)), ' ');
    ranges.begun.push_back(indent.append(what).append(" ").append(unit));
  }
  void range_end() noexcept override { --ranges_of_this_thread().open; }
  const void* find(std::string_view interface) const noexcept override {
    if (interface == comm::DeviceReduceKernels::kInterface) return &kHostSums;
    return interface == nn::KernelFactory::kInterface ? &entry_ : nullptr;
  }

 private:
  const nn::KernelFactory entry_;
  const GuardedOptions options_;
  const std::shared_ptr<GuardedShared> shared_ = std::make_shared<GuardedShared>();
  std::atomic<int> copy_streams_{0};
};

}  // namespace

Ranges drain_ranges() {
  Ranges& ranges = ranges_of_this_thread();
  return {std::exchange(ranges.begun, {}), ranges.open};
}

std::shared_ptr<DeviceRuntime> make_guarded_device(GuardedOptions options) {
  return std::make_shared<GuardedRuntime>(options);
}

GuardedSharing sharing_of(const DeviceRuntime& guarded) {
  return dynamic_cast<const GuardedRuntime&>(guarded).sharing();
}

}  // namespace tessera::harness
