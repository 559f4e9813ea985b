// The same streams as PyTorch's device "cuda", and operations for the tests: torch.ops.fake_cuda. Tensors of the device
// are host memory, which only its streams may touch.
#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <thread>

#include "streams.h"

namespace fake_cuda {
namespace {

const c10::Device kDevice(c10::kCUDA, 0);
thread_local int current = 0;
std::atomic<int> recorded{0};
std::atomic<int> live{0};  // blocks of memory

c10::Stream as_torch(int number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }
Queue& as_own(const c10::Stream& torch) { return stream(static_cast<int>(torch.id())); }
using Holder = std::shared_ptr<Point>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return as_torch(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return as_torch(new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return as_torch(std::exchange(current, static_cast<int>(next.id())));
  }
  void* getStreamNativeHandle(const c10::Stream torch) const override { return &as_own(torch); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Holder;
    *static_cast<Holder*>(*event) = fake_cuda::record(as_own(on));
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event != nullptr) make_wait(as_own(on), *static_cast<Holder*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<Holder*>(event))->look(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Holder*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override { ++recorded; }
};

/// The same elements as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::for_blob(tensor.mutable_data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(c10::kCPU))
      .make_tensor();
}

at::Tensor make(c10::IntArrayRef sizes, c10::IntArrayRef strides, const at::TensorOptions& options, int index = 0) {
  std::int64_t extent = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) extent += (sizes[i] - 1) * strides[i];
  void* const memory =
      std::calloc(static_cast<std::size_t>(std::max<std::int64_t>(extent, 1)), options.dtype().itemsize());
  ++live;
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  return at::for_blob(memory, sizes)
      .strides(strides)
      .deleter([from = current](void* p) {  // as PyTorch's allocator: in the order of the stream that allocated it
        stream(from).push([p] {
          --live;
          std::free(p);
          return true;
        });
      })
      .options(options.device(device))
      .target_device(device)
      .make_tensor();
}

void push(std::function<void()> work) {
  stream(current).push([work = std::move(work)] {
    work();
    return true;
  });
}

at::Tensor tensor(const at::Tensor& host, std::int64_t index) {
  const at::Tensor made = make(host.sizes(), host.strides(), host.options(), static_cast<int>(index));
  on_host(made).copy_(host);
  return made;
}

/// Appended to the current stream.
void fill(const at::Tensor& tensor, double value) {
  push([tensor, value] { on_host(tensor).fill_(value); });
}

/// The values once the current stream gets here; the host waits for it, at most 20 s.
at::Tensor read(const at::Tensor& tensor) {
  const Holder here = record(stream(current));
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!here->look()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < until, "the stream waits for what does not come");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return on_host(tensor).clone();
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return make(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
              at::TensorOptions(dtype.value_or(at::kFloat)));
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  const auto whole = C10_AS_INTARRAYREF_SLOW(sizes);
  std::vector<std::int64_t> strides(whole.size(), 1);
  for (std::size_t i = whole.size(); i-- > 1;) strides[i - 1] = strides[i] * whole[i];
  return make(whole, strides, at::TensorOptions(dtype.value_or(at::kFloat)));
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& from, bool) {
  push([self, from] { on_host(self).copy_(on_host(from)); });
  return self;
}

}  // namespace

TORCH_LIBRARY(fake_cuda, library) {
  c10::impl::registerDeviceGuard(c10::kCUDA, new Guard);
  library.def("tensor(Tensor host, int index=0) -> Tensor", tensor);
  library.def("fill(Tensor tensor, float value) -> ()", fill);
  library.def("read(Tensor tensor) -> Tensor", read);
  library.def("new_stream() -> int", []() -> std::int64_t { return new_stream(); });
  library.def("set_stream(int number) -> ()", [](std::int64_t number) { current = static_cast<int>(number); });
  library.def("pending() -> int",
              []() -> std::int64_t { return static_cast<std::int64_t>(stream(current).pending()); });
  library.def("live() -> int", []() -> std::int64_t { return live.load(); });
  library.def("recorded() -> int", []() -> std::int64_t { return recorded.load(); });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty_strided", empty_strided);
  library.impl("empty.memory_format", empty);
  library.impl("copy_", copy);
}

}  // namespace fake_cuda
