// The same streams as the library's device "cuda", and a backend "nccl" that orders operations by them: loadable
// modules in place of the real ones.
#include <cstdlib>
#include <cstring>

#include "streams.h"
#include "tessera/base/device_module.h"
#include "tessera/base/device_stream.h"
#include "tessera/comm/plugin.h"
#include "tessera/comm/staging.h"

namespace fake_cuda {
namespace {

namespace base = tessera::base;
namespace comm = tessera::comm;

struct Event final : base::Event::State {
  explicit Event(std::shared_ptr<Point> at) : point(std::move(at)) {}
  bool done() const override { return point->look(); }
  void wait() override {
    while (!point->look()) {
    }
  }
  std::int64_t time_ns() override { return 0; }
  const std::shared_ptr<Point> point;
};

class DeviceStream final : public base::DeviceStream {
 public:
  explicit DeviceStream(Queue& on) : base::DeviceStream({base::DeviceType::cuda, 0}, false), on_(on) {}
  void* native() const noexcept override { return &on_; }
  base::Event record() override { return base::Event(std::make_shared<Event>(fake_cuda::record(on_))); }
  void wait(const base::Event& event) override {
    const auto* own = dynamic_cast<const Event*>(event.state().get());
    if (own != nullptr)
      make_wait(on_, own->point);
    else
      on_.push([event] { return event.done(); });
  }

 private:
  Queue& on_;
};

struct HostPoint final : base::Event::State {
  bool done() const override { return set.load(); }
  void wait() override {
    while (!set.load()) {
    }
  }
  std::int64_t time_ns() override { return 0; }
  std::atomic<bool> set{false};
};

class HostEvent final : public base::HostEvent {
 public:
  ~HostEvent() override { set(); }
  base::Event arm() override {
    point_ = std::make_shared<HostPoint>();
    return base::Event(point_);
  }
  void set() noexcept override {
    if (point_ != nullptr) point_->set.store(true);
  }

 private:
  std::shared_ptr<HostPoint> point_;
};

class Runtime final : public base::DeviceRuntime {
 public:
  Runtime() : DeviceRuntime({base::DeviceType::cuda, 0}, {}) {}
  base::DeviceProperties properties() const override { return {.name = "fake"}; }
  std::unique_ptr<base::Stream> make_stream() override { return std::make_unique<DeviceStream>(stream(new_stream())); }
  std::unique_ptr<base::Stream> borrow_stream(void* native) override {
    return std::make_unique<DeviceStream>(*static_cast<Queue*>(native));
  }
  std::unique_ptr<base::HostEvent> make_signal() override { return std::make_unique<HostEvent>(); }
  void* allocate(std::size_t bytes) override { return std::malloc(bytes + 1); }
  void free(void* data, std::size_t) noexcept override { std::free(data); }
  void* allocate_host(std::size_t bytes) override { return std::malloc(bytes + 1); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }
  void copy(base::Stream& on, base::CopyDirection, void* to, const void* from, std::size_t bytes) override {
    push(on, [=] { std::memcpy(to, from, bytes); });
  }
  void fill(base::Stream& on, void* data, unsigned char value, std::size_t bytes) override {
    push(on, [=] { std::memset(data, value, bytes); });
  }
  void synchronize() override {}
  const void* find(std::string_view) const noexcept override { return nullptr; }

 private:
  template <class Work>
  static void push(base::Stream& on, Work work) {
    static_cast<Queue*>(dynamic_cast<DeviceStream&>(on).native())->push([work] {
      work();
      return true;
    });
  }
};

base::DeviceProbe probe() noexcept { return {.problem = "", .devices = {{.name = "fake"}}}; }
base::OpenedDevice open(int) noexcept { return {std::make_shared<Runtime>(), nullptr}; }

/// Works of staging can be waited for by streams, which is all that the tests need of NCCL.
std::unique_ptr<comm::Communicator> create(std::shared_ptr<comm::Bootstrap> bootstrap,
                                           const comm::BackendOptions& options) {
  return comm::stage(comm::find_backend("shm").create(std::move(bootstrap), options), std::make_shared<Runtime>(),
                     {.negotiates_ipc = false});
}

const comm::Backend& backend() {
  static const comm::Backend kBackend{
      .name = "nccl", .devices = "cuda", .probe = [] { return std::string(); }, .create = create};
  return kBackend;
}

}  // namespace
}  // namespace fake_cuda

TESSERA_PLUGIN(fake_cuda::backend)

extern "C" TESSERA_API const tessera_device* tessera_device_entry() {
  static const tessera_device device = {.abi = TESSERA_ABI,
                                        .size = sizeof(tessera_device),
                                        .name = "cuda",
                                        .probe = fake_cuda::probe,
                                        .open = fake_cuda::open};
  return &device;
}
