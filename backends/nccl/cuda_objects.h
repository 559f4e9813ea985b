// Owners of CUDA objects.
#pragma once

#include <cstddef>
#include <new>
#include <string_view>

#include "backends/nccl/api.h"

namespace tessera::comm::nccl {

/// Throws BackendError "WHAT: CUDA's text" unless `error` is success.
void check_cuda(const NcclApi& api, cudaError_t error, std::string_view what);

/// Makes a device current for the thread during the guard's lifetime, for threads of the program. Afterwards the thread
/// has its device of before, if a context of that device exists: to make a device current creates its context, which
/// takes hundreds of MiB there, and a thread that has chosen no device counts as one of device 0. Without a context
/// the guard's device stays current.
class DeviceGuard {
 public:
  /// Throws BackendError.
  DeviceGuard(const NcclApi& api, int device);
  /// If it fails, so do the calls that follow.
  DeviceGuard(const NcclApi& api, int device, std::nothrow_t) noexcept;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  cudaError_t enter(int device) noexcept;

  const NcclApi& api_;
  int before_ = -1;
};

/// A stream that doesn't synchronize with the default one. Created on the current device.
class CudaStream {
 public:
  explicit CudaStream(const NcclApi& api);
  ~CudaStream() { api_.cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const noexcept { return stream_; }

 private:
  const NcclApi& api_;
  cudaStream_t stream_ = nullptr;
};

/// An event without timing. Created on the current device. An event that was never recorded counts as reached.
class CudaEvent {
 public:
  explicit CudaEvent(const NcclApi& api);
  ~CudaEvent() { api_.cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  cudaEvent_t get() const noexcept { return event_; }
  void record(cudaStream_t stream) { check_cuda(api_, api_.cudaEventRecord(event_, stream), "cudaEventRecord"); }
  /// Later work on `stream` runs after this event.
  void make_stream_wait(cudaStream_t stream) const {
    check_cuda(api_, api_.cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  /// True also if the device is broken: then nothing is in flight any more, and `error` reports it.
  bool reached(cudaError_t& error) const noexcept;

 private:
  const NcclApi& api_;
  cudaEvent_t event_ = nullptr;
};

/// A few bytes of device memory and as many of pinned host memory, so that copies between them are asynchronous with
/// respect to the host. Created on the current device.
class PinnedScratch {
 public:
  PinnedScratch(const NcclApi& api, std::size_t bytes);
  ~PinnedScratch();
  PinnedScratch(const PinnedScratch&) = delete;
  PinnedScratch& operator=(const PinnedScratch&) = delete;
  void* device() const noexcept { return device_; }
  void* host() const noexcept { return host_; }

 private:
  const NcclApi& api_;
  void* device_ = nullptr;
  void* host_ = nullptr;
};

/// Memory of the current device.
class DeviceBlock {
 public:
  DeviceBlock(const NcclApi& api, std::size_t bytes);
  ~DeviceBlock() { api_.cudaFree(data_); }
  DeviceBlock(const DeviceBlock&) = delete;
  DeviceBlock& operator=(const DeviceBlock&) = delete;
  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  const NcclApi& api_;
  const std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace tessera::comm::nccl
