#include "tessera/base/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "tessera/base/cuda/device_guard.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"

namespace tessera::base::cuda {
namespace {

/// The content of an IpcMemoryHandle.
struct IpcPayload {
  ProcessIdentity owner{};
  cudaIpcMemHandle_t handle{};
  void* address = nullptr;  ///< in the owner
  char bus[20] = {};        ///< the device's bus id, the same in all processes; device indices may differ
  std::int32_t index = 0;   ///< in the owner
};
static_assert(sizeof(IpcPayload) <= sizeof(IpcMemoryHandle));

/// Unsupported sharing is not a failure, since the caller has alternatives.
void check_shared(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Unsupported("cuda: " + std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
                    ")");
}

}  // namespace

bool has_ipc(int index) noexcept {
  int has = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&has, cudaDevAttrIpcEventSupport, index);
  cudaGetLastError();
  return error == cudaSuccess && has != 0;
}

IpcMemoryHandle IpcMemory::get_ipc_handle(void* data) const {
  IpcPayload content{.owner = this_process(), .handle = {}, .address = data, .bus = {}, .index = index_};
  const DeviceGuard current(index_);
  check_shared(cudaDeviceGetPCIBusId(content.bus, sizeof content.bus, index_), "cudaDeviceGetPCIBusId");
  check_shared(cudaIpcGetMemHandle(&content.handle, data), "cudaIpcGetMemHandle");
  IpcMemoryHandle handle;
  std::memcpy(handle.bytes.data(), &content, sizeof content);
  return handle;
}

/// Enables this device's access to memory of the device `owner`.
void IpcMemory::reach(int owner) const {
  if (owner == index_) return;
  int can = 0;
  check_shared(cudaDeviceCanAccessPeer(&can, index_, owner), "cudaDeviceCanAccessPeer");
  if (can == 0)
    throw Unsupported("cuda: device " + std::to_string(index_) + " has no peer access to device " +
                      std::to_string(owner));
}

void* IpcMemory::open_ipc_handle(const IpcMemoryHandle& handle) {
  IpcPayload content;
  std::memcpy(static_cast<void*>(&content), handle.bytes.data(), sizeof content);
  content.bus[sizeof content.bus - 1] = '\0';
  const DeviceGuard current(index_);
  if (content.owner == this_process()) {  // a process can't open its own handles and needs none
    reach(content.index);
    if (content.index != index_) {
      const cudaError_t error = cudaDeviceEnablePeerAccess(content.index, 0);
      if (error != cudaErrorPeerAccessAlreadyEnabled) check_shared(error, "cudaDeviceEnablePeerAccess");
      cudaGetLastError();
    }
    return content.address;
  }
  int owner = 0;
  const bool visible = cudaDeviceGetByPCIBusId(&owner, content.bus) == cudaSuccess;
  cudaGetLastError();
  if (visible) reach(owner);  // a device that isn't visible may be opened, too
  void* data = nullptr;
  check_shared(cudaIpcOpenMemHandle(&data, content.handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  const std::lock_guard lock(mutex_);
  opened_.insert(data);
  return data;
}

void IpcMemory::release(void* imported) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = opened_.find(imported);
  if (found == opened_.end()) return;
  opened_.erase(found);
  const DeviceGuard current(index_);
  cudaIpcCloseMemHandle(imported);
  cudaGetLastError();
}

}  // namespace tessera::base::cuda
