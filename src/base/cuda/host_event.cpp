#include "tessera/base/cuda/host_event.h"

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "tessera/base/cuda/device_guard.h"
#include "tessera/base/cuda/driver.h"
#include "tessera/base/cuda/runtime.h"
#include "tessera/base/error.h"

namespace tessera::base::cuda {
namespace {

constexpr std::size_t kLine = 128;          ///< each word has its own cache line
constexpr std::size_t kPage = 512 * kLine;  ///< more words than calls in flight: another page may wait for the device

using WaitValue = CUresult (*)(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags);

/// Null if the driver has no such function.
WaitValue wait_value() {
  static const auto kFound = driver_function<WaitValue>("cuStreamWaitValue32", 12000);
  return kFound;
}

class WordSignal final : public HostEvent {
 public:
  explicit WordSignal(std::shared_ptr<WaitWordPool> words)
      : words_(std::move(words)), word_(words_->acquire()), value_(std::atomic_ref(*word_).load()) {}
  ~WordSignal() override {
    set();
    words_->release(word_);
  }
  Event arm() override { return Event(std::make_shared<HostEventState>(words_, word_, ++value_)); }
  void set() noexcept override { std::atomic_ref(*word_).store(value_, std::memory_order_release); }

 private:
  const std::shared_ptr<WaitWordPool> words_;
  std::uint32_t* const word_;
  std::uint32_t value_;  ///< the word's value once the event is set
};

}  // namespace

WaitWordPool::~WaitWordPool() {
  const DeviceGuard current(device_);
  for (void* page : pages_) cudaFreeHost(page);
}

std::uint32_t* WaitWordPool::acquire() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) {
    void* page = nullptr;
    const DeviceGuard current(device_);
    check(cudaHostAlloc(&page, kPage, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(page, 0, kPage);
    pages_.push_back(page);
    for (std::size_t at = 0; at < kPage; at += kLine)
      idle_.push_back(reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(page) + at));
  }
  std::uint32_t* const word = idle_.back();
  idle_.pop_back();
  return word;
}

void WaitWordPool::release(std::uint32_t* word) noexcept {
  const std::lock_guard lock(mutex_);
  idle_.push_back(word);
}

bool HostEventState::done() const {
  return static_cast<std::int32_t>(std::atomic_ref(*word_).load(std::memory_order_acquire) - value_) >= 0;
}

void HostEventState::wait() {
  while (!done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

std::int64_t HostEventState::time_ns() {
  wait();
  return host_time_ns();
}

void HostEventState::make_stream_wait(cudaStream_t stream) const {
  void* address = nullptr;
  check(cudaHostGetDevicePointer(&address, word_, 0), "cudaHostGetDevicePointer");
  const CUresult result =
      wait_value()(stream, reinterpret_cast<CUdeviceptr>(address), value_, CU_STREAM_WAIT_VALUE_GEQ);
  if (result != CUDA_SUCCESS) throw BackendError("cuda: cuStreamWaitValue32: error " + std::to_string(result));
}

std::unique_ptr<HostEvent> make_signal(std::shared_ptr<WaitWordPool> words) {
  if (wait_value() == nullptr) throw Unsupported("cuda: this driver does not support stream waits on host memory");
  return std::make_unique<WordSignal>(std::move(words));
}

}  // namespace tessera::base::cuda
