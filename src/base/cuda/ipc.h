// Shares memory of a CUDA device between the processes of one host through CUDA IPC.
#pragma once

#include <mutex>
#include <set>

#include "tessera/base/device_runtime.h"

namespace tessera::base::cuda {

/// Whether device `index` supports it.
bool has_ipc(int index) noexcept;

/// Implements the IPC functions of DeviceRuntime. Thread-safe.
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

}  // namespace tessera::base::cuda
