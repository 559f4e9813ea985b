#include "tests/base/fake_cudart.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>

namespace tessera::base_test {
namespace {

struct FakeEvent {
  unsigned flags = 0;
  std::chrono::steady_clock::time_point time;
};

thread_local int current = 0;  ///< of a thread that has not chosen a device

/// Each call that needs a context creates that of the current device.
void create_context() { fake_cuda().contexts.insert(current); }

CUresult get_device(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult get_state(CUdevice device, unsigned*, int* active) {
  *active = fake_cuda().contexts.contains(device) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult wait_value(CUstream, CUdeviceptr, cuuint32_t value, unsigned flags) {
  fake_cuda().wait_values.push_back(value);
  fake_cuda().wait_flags.push_back(flags);
  return CUDA_SUCCESS;
}

}  // namespace

FakeCuda& fake_cuda() {
  static FakeCuda one;
  return one;
}

}  // namespace tessera::base_test

using tessera::base_test::create_context;
using tessera::base_test::current;
using tessera::base_test::fake_cuda;
using tessera::base_test::FakeEvent;

// NOLINTBEGIN: the names and types are NVIDIA's
extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the fake"; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* bus, int size, int) {
  std::strncpy(bus, "0000:01:00.0", static_cast<std::size_t>(size));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char*) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
/// Since CUDA 12 it also creates the context.
cudaError_t cudaSetDevice(int device) {
  current = device;
  create_context();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  create_context();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  create_context();
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  create_context();
  std::free(data);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  create_context();
  *data = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  create_context();
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void*) {
  create_context();
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  create_context();
  *device = host;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  create_context();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t) {
  create_context();
  std::memset(data, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  create_context();
  fake_cuda().stream_flags.push_back(flags);
  *stream = reinterpret_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  create_context();
  ++fake_cuda().streams_destroyed;
  return cudaFree(stream);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  create_context();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  create_context();
  fake_cuda().event_flags.push_back(flags);
  ++fake_cuda().events;
  *event = reinterpret_cast<cudaEvent_t>(new FakeEvent{flags, {}});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  create_context();
  --fake_cuda().events;
  delete reinterpret_cast<FakeEvent*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  create_context();
  reinterpret_cast<FakeEvent*>(event)->time = std::chrono::steady_clock::now();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  create_context();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  create_context();
  return cudaSuccess;
}
/// As CUDA, it refuses events without timing.
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
  create_context();
  const auto& a = *reinterpret_cast<FakeEvent*>(first);
  const auto& b = *reinterpret_cast<FakeEvent*>(second);
  if (((a.flags | b.flags) & cudaEventDisableTiming) != 0) return cudaErrorInvalidResourceHandle;
  *ms = std::chrono::duration<float, std::milli>(b.time - a.time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode mode) {
  create_context();
  fake_cuda().modes.push_back(mode);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  create_context();
  *graph = reinterpret_cast<cudaGraph_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t, unsigned long long) {
  create_context();
  *exec = reinterpret_cast<cudaGraphExec_t>(std::malloc(1));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaFree(graph); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaFree(exec); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  create_context();
  return cudaSuccess;
}

/// The handle holds the address.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  create_context();
  std::memcpy(handle->reserved, &data, sizeof(data));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  create_context();
  std::memcpy(data, handle.reserved, sizeof(*data));
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  create_context();
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  fake_cuda().entry_versions.push_back(version);
  const std::string_view wanted = name;
  *function = nullptr;
  if (wanted == "cuStreamWaitValue32" && fake_cuda().has_wait_value)
    *function = reinterpret_cast<void*>(tessera::base_test::wait_value);
  if (wanted == "cuDeviceGet") *function = reinterpret_cast<void*>(tessera::base_test::get_device);
  if (wanted == "cuDevicePrimaryCtxGetState") *function = reinterpret_cast<void*>(tessera::base_test::get_state);
  *status = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}
// NOLINTEND
