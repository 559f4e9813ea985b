// Points that the host reaches and streams of a CUDA device wait for, by themselves: words of pinned memory that the
// device compares with a number before it goes on. No kernel spins and no function of the host is called for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/device_runtime.h"

namespace tessera::base::cuda {

/// Words that only ever count up: who waits for a number that was passed long ago goes on, so a word may serve the next
/// signal while a stream has yet to look at it. Thread-safe.
class WaitWordPool {
 public:
  WaitWordPool() = default;
  ~WaitWordPool();
  WaitWordPool(const WaitWordPool&) = delete;
  WaitWordPool& operator=(const WaitWordPool&) = delete;
  std::uint32_t* take();
  void give(std::uint32_t* word) noexcept;

 private:
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
  /// What `stream` does from here on comes after this point.
  void make_stream_wait(cudaStream_t stream) const;

 private:
  const std::shared_ptr<WaitWordPool> words_;  ///< keeps the word's page
  std::uint32_t* const word_;
  const std::uint32_t value_;
};

/// Throws Unsupported where the driver can't let streams wait for memory.
std::unique_ptr<HostEvent> make_signal(std::shared_ptr<WaitWordPool> words);

}  // namespace tessera::base::cuda
