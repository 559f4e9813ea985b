#include "tessera/nn/kernel_interceptor.h"

#include "tessera/nn/kernels/instrumented/instrumented_kernels.h"

namespace tessera::nn {

KernelInterceptor::~KernelInterceptor() = default;

namespace {

/// Forwards all calls; those that submit work to streams go through the observer.
class InstrumentedRuntime final : public DeviceRuntime {
 public:
  InstrumentedRuntime(std::shared_ptr<DeviceRuntime> inner, KernelInterceptor& observer,
                      std::function<std::unique_ptr<Stream>()> make_stream)
      : DeviceRuntime(inner->device(), inner->traits()),
        inner_(std::move(inner)),
        observer_(observer),
        make_stream_(std::move(make_stream)) {}

  DeviceRuntime& inner() { return *inner_; }
  KernelInterceptor& observer() { return observer_; }

  DeviceProperties properties() const override { return inner_->properties(); }
  std::unique_ptr<Stream> make_stream() override { return make_stream_ ? make_stream_() : inner_->make_stream(); }
  std::unique_ptr<Stream> make_copy_stream() override {
    return make_stream_ ? make_stream_() : inner_->make_copy_stream();
  }
  std::unique_ptr<HostEvent> make_signal() override { return inner_->make_signal(); }
  void wait_for_host_events() override { inner_->wait_for_host_events(); }
  void* allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  void free(void* data, std::size_t bytes) noexcept override { inner_->free(data, bytes); }
  IpcMemoryHandle get_ipc_handle(void* data, std::size_t bytes) override { return inner_->get_ipc_handle(data, bytes); }
  void* open_ipc_handle(const IpcMemoryHandle& handle) override { return inner_->open_ipc_handle(handle); }
  void close_ipc_handle(void* imported) noexcept override { inner_->close_ipc_handle(imported); }
  void* allocate_host(std::size_t bytes) override { return inner_->allocate_host(bytes); }
  void free_host(void* data, std::size_t bytes) noexcept override { inner_->free_host(data, bytes); }
  void pin_host(void* data, std::size_t bytes) override { inner_->pin_host(data, bytes); }
  void unpin_host(void* data, std::size_t bytes) noexcept override { inner_->unpin_host(data, bytes); }
  void begin_capture(Stream& stream) override { inner_->begin_capture(stream); }
  std::unique_ptr<Graph> end_capture(Stream& stream) override { return inner_->end_capture(stream); }
  void synchronize() override { inner_->synchronize(); }
  void range_begin(std::string_view what, std::string_view unit) noexcept override { inner_->range_begin(what, unit); }
  void range_end() noexcept override { inner_->range_end(); }

  void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) override {
    observer_.call(call_of(name_of(direction), bytes, true), stream,
                   [&] { inner_->copy(stream, direction, to, from, bytes); });
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    observer_.call(call_of("clear", bytes, false), stream, [&] { inner_->fill(stream, data, value, bytes); });
  }
  const void* find(std::string_view interface) const noexcept override {
    static constexpr KernelFactory kEntry{[](const KernelResources& resources) {
      auto& runtime = dynamic_cast<InstrumentedRuntime&>(resources.runtime);
      return std::unique_ptr<DeviceKernels>(std::make_unique<InstrumentedDeviceKernels>(
          make_kernels({runtime.inner(), resources.memory, resources.threads, resources.logger, resources.planned,
                        resources.products}),
          runtime.observer()));
    }};
    return interface == KernelFactory::kInterface ? &kEntry : inner_->find(interface);
  }

 private:
  static std::string_view name_of(CopyDirection direction) {
    if (direction == CopyDirection::device_to_device) return "copy";
    return direction == CopyDirection::host_to_device ? "copy_from_host" : "copy_to_host";
  }
  static KernelInvocation call_of(std::string_view kernel, std::size_t bytes, bool reads) {
    const auto size = static_cast<double>(bytes);
    return {
        .kernel = kernel, .dtype = DType::u8, .size = size, .reads = reads ? size : 0, .writes = size, .product = {}};
  }
  const std::shared_ptr<DeviceRuntime> inner_;
  KernelInterceptor& observer_;
  const std::function<std::unique_ptr<Stream>()> make_stream_;
};

}  // namespace

std::shared_ptr<DeviceRuntime> observe(std::shared_ptr<DeviceRuntime> inner, KernelInterceptor& observer,
                                       std::function<std::unique_ptr<Stream>()> make_stream) {
  return std::make_shared<InstrumentedRuntime>(std::move(inner), observer, std::move(make_stream));
}

}  // namespace tessera::nn
