#include "tessera/base/cuda/runtime.h"

#include <cuda.h>

#include <algorithm>
#include <vector>

#include "tessera/base/cuda/device_guard.h"
#include "tessera/base/cuda/stream.h"
#include "tessera/base/error.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/thread.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define TESSERA_HAS_NVTX
#endif

namespace tessera::base::cuda {
namespace {

std::string text_of(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

/// "12.5" of 12050.
std::string version_text(int code) { return std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10); }

DeviceProperties properties_of(int index) {
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, index), "cudaGetDeviceProperties");
  return {.name = prop.name,
          .memory_bytes = prop.totalGlobalMem,
          .processors = prop.multiProcessorCount,
          .generation = prop.major * 10 + prop.minor,
          .shares_memory = has_ipc(index)};
}

#ifdef TESSERA_HAS_NVTX

/// Null if no profiler is attached, which is determined at the first call.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("tessera");
  return made;
}

void push(const char* name) noexcept {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

/// Begins a range of the calling thread in an attached profiler, named "WHAT UNIT"; ranges nest. Without a profiler
/// each call is one comparison.
void begin_range(std::string_view what, std::string_view unit) noexcept {
  if (domain() == nullptr) return;
  try {
    push(std::string(what).append(" ").append(unit).c_str());
  } catch (const std::exception&) {
    push("?");  // no memory for a name; the range is ended all the same
  }
}

void end_range() noexcept {
  if (domain() != nullptr) nvtxDomainRangePop(domain());
}

#else  // a toolkit without these headers

void begin_range(std::string_view, std::string_view) noexcept {}
void end_range() noexcept {}

#endif

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaGraph_t recorded) {
    check(cudaGraphInstantiate(&graph_, recorded, 0), "cudaGraphInstantiate");
  }
  ~CudaGraph() override { cudaGraphExecDestroy(graph_); }
  void launch(Stream& stream) override { check(cudaGraphLaunch(graph_, native(stream)), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime(int index, Find interfaces)
      : DeviceRuntime({DeviceType::cuda, index},
                      {.host_accessible = false, .slow_allocation = true, .shares_memory = has_ipc(index)}),
        index_(index),
        find_(interfaces),
        ipc_(index),
        events_(index),
        words_(std::make_shared<WaitWordPool>(index)) {
    const SignalBlock no_signals;                   // in the threads that CUDA starts
    check(cudaSetDevice(index_), "cudaSetDevice");  // creates the context, or says why it can't
  }

  DeviceProperties properties() const override { return properties_of(index_); }

  std::unique_ptr<Stream> make_stream() override {
    const DeviceGuard current(index_);
    return std::make_unique<CudaStream>(device(), events_, waits_, false);
  }
  std::unique_ptr<Stream> make_copy_stream() override {
    const DeviceGuard current(index_);
    return std::make_unique<CudaStream>(device(), events_, waits_, true);
  }
  std::unique_ptr<Stream> borrow_stream(void* native) override {
    return std::make_unique<CudaStream>(device(), events_, waits_, static_cast<cudaStream_t>(native));
  }
  std::unique_ptr<HostEvent> make_signal() override {
    const DeviceGuard current(index_);
    return cuda::make_signal(words_);
  }

  void wait_for_host_events() override { waits_->wait_all(); }

  void* allocate(std::size_t bytes) override {
    const DeviceGuard current(index_);
    void* data = nullptr;
    check(cudaMalloc(&data, std::max(bytes, kAlignment)), "cudaMalloc of " + std::to_string(bytes) + " bytes");
    return data;
  }
  void free(void* data, std::size_t) noexcept override {
    const DeviceGuard current(index_);
    cudaFree(data);
  }

  IpcMemoryHandle get_ipc_handle(void* data, std::size_t) override { return ipc_.get_ipc_handle(data); }
  void* open_ipc_handle(const IpcMemoryHandle& handle) override { return ipc_.open_ipc_handle(handle); }
  void close_ipc_handle(void* imported) noexcept override { ipc_.release(imported); }

  void* allocate_host(std::size_t bytes) override {
    const DeviceGuard current(index_);
    void* data = nullptr;
    check(cudaHostAlloc(&data, std::max(bytes, kAlignment), cudaHostAllocPortable),
          "cudaHostAlloc of " + std::to_string(bytes) + " bytes");
    return data;
  }
  void free_host(void* data, std::size_t) noexcept override {
    const DeviceGuard current(index_);
    cudaFreeHost(data);
  }

  void pin_host(void* data, std::size_t bytes) override {
    const DeviceGuard current(index_);
    check(cudaHostRegister(data, bytes, cudaHostRegisterPortable), "cudaHostRegister");
  }
  void unpin_host(void* data, std::size_t) noexcept override {
    const DeviceGuard current(index_);
    cudaHostUnregister(data);
  }

  void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const DeviceGuard current(index_);
    constexpr cudaMemcpyKind kKinds[] = {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice};
    const cudaMemcpyKind kind = kKinds[static_cast<std::size_t>(direction)];
    check(cudaMemcpyAsync(to, from, bytes, kind, native(stream)), "cudaMemcpyAsync");
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    if (bytes == 0) return;
    const DeviceGuard current(index_);
    check(cudaMemsetAsync(data, value, bytes, native(stream)), "cudaMemsetAsync");
  }

  /// Relaxed, so that pools may allocate memory meanwhile.
  void begin_capture(Stream& stream) override {
    const DeviceGuard current(index_);
    check(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  }
  std::unique_ptr<Graph> end_capture(Stream& stream) override {
    const DeviceGuard current(index_);
    struct Recorded {
      cudaGraph_t graph = nullptr;
      ~Recorded() {
        if (graph != nullptr) cudaGraphDestroy(graph);
      }
    } recorded;
    check(cudaStreamEndCapture(native(stream), &recorded.graph), "cudaStreamEndCapture");
    return std::make_unique<CudaGraph>(recorded.graph);
  }

  void synchronize() override {
    const DeviceGuard current(index_);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void range_begin(std::string_view what, std::string_view unit) noexcept override { begin_range(what, unit); }
  void range_end() noexcept override { end_range(); }
  const void* find(std::string_view interface) const noexcept override {
    cudaSetDevice(index_);  // the table found may initialize itself there
    return find_(interface);
  }

 private:
  const int index_;
  const Find find_;
  IpcMemory ipc_;
  const EventPools events_;
  const std::shared_ptr<HostWaits> waits_ = std::make_shared<HostWaits>();
  const std::shared_ptr<WaitWordPool> words_;
};

}  // namespace

void check(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears a non-sticky error, which was reported
  const std::string text = "cuda: " + std::string(what) + ": " + text_of(error);
  if (error == cudaErrorMemoryAllocation) throw SystemError(text);
  throw BackendError(text);
}

cudaStream_t native(Stream& stream) {
  auto* own = dynamic_cast<DeviceStream*>(&stream);
  if (own == nullptr || stream.device().type != DeviceType::cuda)
    throw InvalidUsage("cuda: stream is on " + name_of(stream.device()) + ", needs a cuda stream");
  own->prepare_launch();
  return static_cast<cudaStream_t>(own->native());
}

void load_kernels(const void* kernel) {
  cudaFunction_t function = nullptr;
  check(cudaGetFuncBySymbol(&function, kernel), "cudaGetFuncBySymbol");
  const auto get_module = driver_function<decltype(&cuFuncGetModule)>("cuFuncGetModule", 11000);
  const auto get_count = driver_function<decltype(&cuModuleGetFunctionCount)>("cuModuleGetFunctionCount", 12040);
  const auto enumerate = driver_function<decltype(&cuModuleEnumerateFunctions)>("cuModuleEnumerateFunctions", 12040);
  const auto load = driver_function<decltype(&cuFuncLoad)>("cuFuncLoad", 12040);
  if (get_module == nullptr || get_count == nullptr || enumerate == nullptr || load == nullptr)
    return;  // a driver before CUDA 12.4: CUDA_MODULE_LOADING=EAGER has loaded them
  const auto require = [](CUresult result, const char* what) {
    if (result != CUDA_SUCCESS)
      throw BackendError("cuda: loading kernels: " + std::string(what) + ": error " + std::to_string(result));
  };
  CUmodule module = nullptr;
  unsigned count = 0;
  require(get_module(&module, function), "cuFuncGetModule");
  require(get_count(&count, module), "cuModuleGetFunctionCount");
  std::vector<CUfunction> all(count);
  require(enumerate(all.data(), count, module), "cuModuleEnumerateFunctions");
  for (CUfunction one : all) require(load(one), "cuFuncLoad");
}

DeviceProbe probe() noexcept {
  DeviceProbe result;
  try {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (error != cudaSuccess && driver > 0 && driver / 1000 < CUDART_VERSION / 1000) {
      result.problem = "the driver supports CUDA " + version_text(driver) + ", this build needs a driver of CUDA " +
                       std::to_string(CUDART_VERSION / 1000) + ".0 or newer";
    } else if (error != cudaSuccess) {
      result.problem = text_of(error);
    } else if (count == 0) {
      result.problem = "no CUDA device found";
    }
    for (int i = 0; i < count && result.problem.empty(); ++i) result.devices.push_back(properties_of(i));
    for (const DeviceProperties& device : result.devices)
      if (device.generation < TESSERA_CUDA_LEAST_GENERATION)
        result.problem = device.name + " is of generation " + std::to_string(device.generation) +
                         ", this build needs " + std::to_string(TESSERA_CUDA_LEAST_GENERATION) + " or later";
  } catch (const std::exception& error) {
    result.problem = error.what();
  }
  return result;
}

std::shared_ptr<DeviceRuntime> open(int index, Find find) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  if (index < 0 || index >= count)
    throw InvalidUsage("device cuda:" + std::to_string(index) + ": no such device; this host has " +
                       std::to_string(count));
  return std::make_shared<CudaRuntime>(index, find);
}

}  // namespace tessera::base::cuda
