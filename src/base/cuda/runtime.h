// The CUDA DeviceRuntime: memory, streams, events and copies, over the vendor's runtime library.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "tessera/base/device_module.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/device_stream.h"

namespace tessera::base::cuda {

/// Whether device `index` supports CUDA IPC.
bool has_ipc(int index) noexcept;

/// Implements the IPC functions of DeviceRuntime: shares memory between the processes of one host through CUDA IPC.
/// Thread-safe.
class IpcMemory {
 public:
  explicit IpcMemory(int index) : index_(index) {}
  IpcMemoryHandle get_ipc_handle(void* data) const;
  void* open_ipc_handle(const IpcMemoryHandle& handle);
  void release(void* imported) noexcept;

 private:
  void reach(int owner) const;

  const int index_;
  std::mutex mutex_;
  std::multiset<void*> opened_;  ///< of other processes; memory opened twice has one address, closed twice
};

/// Throws BackendError "cuda: WHAT: the vendor's text" if `error` is one; SystemError if memory is exhausted.
void check(cudaError_t error, std::string_view what);

/// Finds tables of the layers above in this device, by name.
using Find = const void* (*)(std::string_view interface) noexcept;

/// Loads all kernels of the module that `kernel`, a kernel of this library, belongs to: those of one source file.
/// Throws BackendError.
void load_kernels(const void* kernel);

/// The handle of a stream, for one piece of work. Throws InvalidUsage if it is not a stream of such a device.
cudaStream_t native(Stream& stream);

/// Returns why no device can be used, and the devices found. Loads nothing and creates no context.
DeviceProbe probe() noexcept;

/// Opens device `index`. Throws InvalidUsage if it doesn't exist.
std::shared_ptr<DeviceRuntime> open(int index, Find find);

// Tables of the layers above in this device's module. Each layer defines its own function beside its kernels: base
// doesn't know the layers' tables, nor do they know each other's.
const void* find_of_nn(std::string_view interface) noexcept;    ///< src/nn/kernels/cuda
std::string libraries_of_nn() noexcept;                         ///< what DeviceProbe::libraries says of them
const void* find_of_comm(std::string_view interface) noexcept;  ///< src/comm/kernels/cuda

}  // namespace tessera::base::cuda
