#include "tests/backends/nccl/fake_cuda.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace tessera::nccl_test {
namespace {

thread_local int device_of_thread = 0;

std::map<FakeStream*, std::shared_ptr<FakeStream>>& streams() {
  static std::map<FakeStream*, std::shared_ptr<FakeStream>> all;
  return all;
}

FakeEvent& event_of(cudaEvent_t event) { return *reinterpret_cast<FakeEvent*>(event); }

cudaError_t get_device_count(int* count) {
  const auto lock = fake_lock();
  *count = fake_state().options.devices;
  return static_cast<cudaError_t>(fake_state().options.driver_error);
}

cudaError_t set_device(int device) {
  const auto lock = fake_lock();
  if (device < 0 || device >= fake_state().options.devices) return cudaErrorInvalidDevice;
  device_of_thread = device;
  enter_context();
  return cudaSuccess;
}

cudaError_t get_device(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}

cudaError_t allocate(void** data, std::size_t bytes) {
  const auto lock = fake_lock();
  enter_context();
  *data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (*data == nullptr || bytes > (std::size_t{1} << 40)) return cudaErrorMemoryAllocation;
  std::memset(*data, 0xFF, bytes);
  ++fake_state().counts.blocks;
  return cudaSuccess;
}

cudaError_t free_memory(void* data) {
  const auto lock = fake_lock();
  enter_context();
  for (const auto& call : fake_state().copy_engine_calls)
    if (call->device == device_of_thread && call->never_ends())
      fake_state().complain("a free waits for a stream that never ends");
  if (data == nullptr) return cudaSuccess;
  --fake_state().counts.blocks;
  std::free(data);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const auto lock = fake_lock();
  enter_context();
  stream_of(stream).tasks.emplace_back([=] {
    std::memmove(to, from, bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t set(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  const auto lock = fake_lock();
  enter_context();
  stream_of(stream).tasks.emplace_back([=] {
    std::memset(to, value, bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t create_stream(cudaStream_t* stream, unsigned) {
  const auto lock = fake_lock();
  enter_context();
  auto made = std::make_shared<FakeStream>();
  made->device = device_of_thread;
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  streams()[made.get()] = std::move(made);
  ++fake_state().counts.streams;
  return cudaSuccess;
}

cudaError_t destroy_stream(cudaStream_t stream) {
  const auto lock = fake_lock();
  enter_context();
  FakeStream& which = stream_of(stream);
  which.run();
  if (!which.tasks.empty()) fake_state().complain("a stream is destroyed while its work waits for something");
  which.tasks.clear();
  streams().erase(&which);
  --fake_state().counts.streams;
  return cudaSuccess;
}

cudaError_t create_event(cudaEvent_t* event, unsigned) {
  const auto lock = fake_lock();
  enter_context();
  *event = reinterpret_cast<cudaEvent_t>(new FakeEvent{.device = device_of_thread});
  ++fake_state().counts.events;
  return cudaSuccess;
}

cudaError_t destroy_event(cudaEvent_t event) {
  const auto lock = fake_lock();
  enter_context();
  delete &event_of(event);
  --fake_state().counts.events;
  return cudaSuccess;
}

cudaError_t record_event(cudaEvent_t event, cudaStream_t stream) {
  const auto lock = fake_lock();
  enter_context();
  if (stream_of(stream).device != event_of(event).device) return cudaErrorInvalidResourceHandle;
  auto mark = std::make_shared<Mark>();
  mark->stream = stream_of(stream).shared_from_this();
  event_of(event).mark = mark;
  stream_of(stream).tasks.emplace_back([mark] {
    mark->reached = true;
    mark->stream.reset();
    return true;
  });
  return cudaSuccess;
}

bool reach(Mark& mark) {
  if (!mark.reached) std::shared_ptr<FakeStream>(mark.stream)->run();
  return mark.reached;
}

cudaError_t stream_wait(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto lock = fake_lock();
  enter_context();
  if (const std::shared_ptr<Mark> mark = event_of(event).mark)
    stream_of(stream).tasks.emplace_back([mark] { return reach(*mark); });
  return cudaSuccess;
}

cudaError_t query_event(cudaEvent_t event) {
  const auto lock = fake_lock();
  enter_context();
  ++fake_state().counts.queries;
  const std::shared_ptr<Mark> mark = event_of(event).mark;
  return mark == nullptr || reach(*mark) ? cudaSuccess : cudaErrorNotReady;
}

/// The library's own kernels, on the fake's streams.
cudaError_t load_kernels() {
  const auto lock = fake_lock();
  enter_context();
  ++fake_state().counts.kernel_loads;
  return cudaSuccess;
}

cudaError_t reduce_tree_later(const comm::nccl::TreeReduceArgs& work, cudaStream_t stream) {
  const auto lock = fake_lock();
  stream_of(stream).tasks.emplace_back([work] {
    base::with_dtype(work.dtype, [&](auto zero) {
      for (std::size_t i = 0; i < work.count; ++i) comm::nccl::tree_element<decltype(zero)>(work, i);
    });
    return true;
  });
  return cudaSuccess;
}

cudaError_t store_later(double* to, double value, cudaStream_t stream) {
  const auto lock = fake_lock();
  stream_of(stream).tasks.emplace_back([=] {
    *to = value;
    return true;
  });
  return cudaSuccess;
}

const char* error_string(cudaError_t error) {
  return error == cudaErrorInsufficientDriver ? "CUDA driver version is insufficient for CUDA runtime version"
                                              : "fake error";
}

}  // namespace

void FakeStream::run() {
  if (running) return;  // a task polls its own stream
  const std::shared_ptr<FakeStream> keep = shared_from_this();
  running = true;
  while (!tasks.empty() && tasks.front()()) tasks.pop_front();
  running = false;
}

void FakeState::complain(const std::string& what) {
  if (counts.complaints++ == 0) counts.complaint = what;
}

FakeState& fake_state() {
  static FakeState state;
  return state;
}

FakeStream& stream_of(cudaStream_t stream) {
  return stream == nullptr ? default_stream(device_of_thread) : *reinterpret_cast<FakeStream*>(stream);
}

FakeStream& default_stream(int device) {
  static std::map<int, std::shared_ptr<FakeStream>> all;
  std::shared_ptr<FakeStream>& found = all[device];
  if (found == nullptr) found = std::make_shared<FakeStream>();
  found->device = device;
  return *found;
}
int current_device() { return device_of_thread; }
void enter_context() { fake_state().counts.contexts.insert(device_of_thread); }

void add_cuda(comm::nccl::NcclApi& api) {
  static constexpr comm::nccl::TreeKernels kKernels{load_kernels, reduce_tree_later, store_later};
  api.tree = &kKernels;
  api.cudaGetErrorString = error_string;
  api.cudaGetLastError = [] { return cudaSuccess; };
  api.cudaGetDeviceCount = get_device_count;
  api.cudaDeviceGetPCIBusId = [](char* text, int bytes, int device) {
    std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device);
    return cudaSuccess;
  };
  api.setenv = [](const char* name, const char* value, int overwrite) {
    const auto lock = fake_lock();
    fake_state().environment.insert(std::string(name) + "=" + value + (overwrite != 0 ? " overwritten" : ""));
    return 0;
  };
  api.cudaGetDevice = get_device;
  api.cuDevicePrimaryCtxGetState = [](int device, unsigned*, int* active) {
    const auto lock = fake_lock();
    *active = fake_state().counts.contexts.contains(device) ? 1 : 0;
    return 0;
  };
  api.cudaSetDevice = set_device;
  api.cudaMalloc = allocate;
  api.cudaFree = free_memory;
  api.cudaHostAlloc = [](void** data, std::size_t bytes, unsigned) { return allocate(data, bytes); };
  api.cudaFreeHost = free_memory;
  api.cudaMemcpyAsync = copy;
  api.cudaMemsetAsync = set;
  api.cudaStreamCreateWithFlags = create_stream;
  api.cudaStreamDestroy = destroy_stream;
  api.cudaStreamWaitEvent = stream_wait;
  api.cudaEventCreateWithFlags = create_event;
  api.cudaEventDestroy = destroy_event;
  api.cudaEventRecord = record_event;
  api.cudaEventQuery = query_event;
}

std::set<std::string> fake_environment() {
  const auto lock = fake_lock();
  return fake_state().environment;
}

}  // namespace tessera::nccl_test
