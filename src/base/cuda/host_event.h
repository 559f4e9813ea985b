// Host events that streams of a CUDA device wait for on the device: words of pinned memory that the device compares
// with a number. No kernel spins and no host function is called for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/device_runtime.h"

namespace tessera::base::cuda {

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

}  // namespace tessera::base::cuda
