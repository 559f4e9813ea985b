#include "tessera/base/cuda/stream.h"

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "tessera/base/cuda/device_guard.h"
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

constexpr std::int64_t kReferenceLasts = 2'000'000'000;  // ns: f32 milliseconds resolve a quarter of a microsecond then

std::int64_t between(cudaEvent_t first, cudaEvent_t second) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, first, second), "cudaEventElapsedTime");
  return std::llround(static_cast<double>(ms) * 1e6);
}

class CudaEvent final : public Event::State {
 public:
  /// `reference`: null for an event without time.
  CudaEvent(int device, std::shared_ptr<EventPool> pool, cudaStream_t stream, std::shared_ptr<Reference> reference)
      : device_(device), pool_(std::move(pool)), reference_(std::move(reference)), event_(pool_->acquire()) {
    check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  ~CudaEvent() override { pool_->release(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() const override {
    const DeviceGuard current(device_);  // the calling thread may have chosen no device
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) return false;
    check(error, "cudaEventQuery");
    return true;
  }
  void wait() override {
    const DeviceGuard current(device_);
    check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }
  std::int64_t time_ns() override {
    if (reference_ == nullptr) throw InvalidUsage("event: it has no time; record it by record_timed()");
    wait();
    const DeviceGuard current(device_);
    return reference_->time_ns() + between(reference_->event(), event_);
  }
  cudaEvent_t event() const { return event_; }

 private:
  const int device_;
  const std::shared_ptr<EventPool> pool_;
  const std::shared_ptr<Reference> reference_;
  cudaEvent_t event_;
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

EventPool::~EventPool() {
  const DeviceGuard current(device_);
  for (cudaEvent_t event : idle_) cudaEventDestroy(event);
}

cudaEvent_t EventPool::acquire() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      cudaEvent_t event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timed_ ? cudaEventDefault : cudaEventDisableTiming),
        "cudaEventCreateWithFlags");
  return event;
}

void EventPool::release(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

Reference::Reference(std::shared_ptr<EventPool> pool, cudaStream_t stream, std::shared_ptr<Reference> before)
    : pool_(std::move(pool)), event_(pool_->acquire()), recorded_ns_(host_time_ns()), before_(std::move(before)) {
  check(cudaEventRecord(event_, stream), "cudaEventRecord");
  if (before_ != nullptr) return;
  check(cudaEventSynchronize(event_), "cudaEventSynchronize");
  recorded_ns_ = time_ns_ = host_time_ns();
}

std::int64_t Reference::time_ns() {
  if (before_ != nullptr) {
    check(cudaEventSynchronize(event_), "cudaEventSynchronize");
    time_ns_ = before_->time_ns() + between(before_->event(), event_);
    before_ = nullptr;
  }
  return time_ns_;
}

CudaStream::CudaStream(Device device, EventPools pools, std::shared_ptr<HostWaits> waits, bool urgent)
    : DeviceStream(device, false), pools_(std::move(pools)), waits_(std::move(waits)), urgent_(urgent), owned_(true) {
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least),
        "cudaStreamCreateWithPriority");
  reference_ = std::make_shared<Reference>(pools_.timed, stream_, nullptr);  // now, since it waits for the stream
}

CudaStream::CudaStream(Device device, EventPools pools, std::shared_ptr<HostWaits> waits, cudaStream_t borrowed)
    : DeviceStream(device, false),
      pools_(std::move(pools)),
      waits_(std::move(waits)),
      urgent_(false),
      owned_(false),
      stream_(borrowed) {}

CudaStream::~CudaStream() {
  const DeviceGuard current(device().index);
  if (owned_) cudaStreamDestroy(stream_);
}

Event CudaStream::record() {
  const DeviceGuard current(device().index);  // events are created on the thread's current device
  return Event(std::make_shared<CudaEvent>(device().index, pools_.plain, stream_, nullptr));
}

Event CudaStream::record_timed() {
  const DeviceGuard current(device().index);
  if (reference_ == nullptr || host_time_ns() - reference_->recorded_ns() > kReferenceLasts)
    reference_ = std::make_shared<Reference>(pools_.timed, stream_, std::move(reference_));
  return Event(std::make_shared<CudaEvent>(device().index, pools_.timed, stream_, reference_));
}

void CudaStream::prepare_launch() {
  check(cudaSetDevice(device().index), "cudaSetDevice");
  if (!urgent_) waits_->count_work();  // the thread that copies is the one that sets events
}

void CudaStream::wait(const Event& event) {
  const DeviceGuard current(device().index);  // a borrowed handle may be 0, the current device's default stream
  if (const auto* own = dynamic_cast<const CudaEvent*>(event.state().get())) {
    check(cudaStreamWaitEvent(stream_, own->event(), 0), "cudaStreamWaitEvent");
  } else if (const auto* point = dynamic_cast<const HostEventState*>(event.state().get())) {
    if (point->done()) return;
    waits_->add(event);
    point->make_stream_wait(stream_);
  } else {
    event.wait();  // a host event: it must be reached before the device continues
  }
}

}  // namespace tessera::base::cuda
