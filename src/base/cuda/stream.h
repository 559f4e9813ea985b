// Streams and events of a CUDA device, and host events.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/device/host_waits.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/device_stream.h"

namespace tessera::base::cuda {

// Host events that streams of a CUDA device wait for on the device: words of pinned memory that the device compares
// with a number. No kernel spins and no host function is called for it.

/// Words that only increase: a stream that waits for a number already passed continues, so a word can serve the next
/// event while a stream has yet to check it. Thread-safe.
class WaitWordPool {
 public:
  explicit WaitWordPool(int device) : device_(device) {}
  ~WaitWordPool();
  std::uint32_t* acquire();
  void release(std::uint32_t* word) noexcept;

 private:
  const int device_;
  std::mutex mutex_;
  std::vector<void*> pages_;
  std::vector<std::uint32_t*> idle_;
};

class HostEventState final : public Event::State {
 public:
  HostEventState(std::shared_ptr<WaitWordPool> words, std::uint32_t* word, std::uint32_t value)
      : words_(std::move(words)), word_(word), value_(value) {}
  bool done() const override;
  void wait() override;
  std::int64_t time_ns() override;
  /// Later work of `stream` runs after this event.
  void make_stream_wait(cudaStream_t stream) const;

 private:
  const std::shared_ptr<WaitWordPool> words_;  ///< keeps the word's page alive
  std::uint32_t* const word_;
  const std::uint32_t value_;
};

/// Throws Unsupported if the driver doesn't support streams that wait for memory.
std::unique_ptr<HostEvent> make_signal(std::shared_ptr<WaitWordPool> words);

/// A pool of events for reuse: creating one costs more than recording it. Thread-safe: streams of several threads share
/// it.
class EventPool {
 public:
  /// `timed`: device `device` notes when an event is reached.
  EventPool(int device, bool timed) : device_(device), timed_(timed) {}
  ~EventPool();
  cudaEvent_t acquire();  ///< created on the thread's current device
  void release(cudaEvent_t event);

 private:
  const int device_;
  const bool timed_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

/// The events of a device.
struct EventPools {
  explicit EventPools(int device)
      : plain(std::make_shared<EventPool>(device, false)), timed(std::make_shared<EventPool>(device, true)) {}
  std::shared_ptr<EventPool> plain, timed;
};

/// An event whose time on the host's clock is known, or follows from an earlier one. CUDA measures spans in f32
/// milliseconds, so a span must stay short to resolve microseconds.
class Reference {
 public:
  Reference(std::shared_ptr<EventPool> pool, cudaStream_t stream, std::shared_ptr<Reference> before);
  ~Reference() { pool_->release(event_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  /// On the host's clock; waits for the event if necessary.
  std::int64_t time_ns();
  std::int64_t recorded_ns() const { return recorded_ns_; }
  cudaEvent_t event() const { return event_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  cudaEvent_t event_;
  std::int64_t recorded_ns_;
  std::shared_ptr<Reference> before_;  // null: time_ns_ is known
  std::int64_t time_ns_ = 0;
};

class CudaStream final : public DeviceStream {
 public:
  /// Created on the thread's current device. `urgent`: the device prefers it and gives it a queue of its own.
  CudaStream(Device device, EventPools pools, std::shared_ptr<HostWaits> waits, bool urgent);
  /// Over `borrowed`, which stays its owner's.
  CudaStream(Device device, EventPools pools, std::shared_ptr<HostWaits> waits, cudaStream_t borrowed);
  ~CudaStream() override;
  void* native() const noexcept override { return stream_; }
  void prepare_launch() override;
  Event record() override;
  Event record_timed() override;
  void wait(const Event& event) override;

 private:
  const EventPools pools_;
  const std::shared_ptr<HostWaits> waits_;  ///< the device's
  const bool urgent_;
  const bool owned_;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<Reference> reference_;  ///< of timed events; null: none yet
};

}  // namespace tessera::base::cuda
