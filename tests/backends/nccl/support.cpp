#include "tests/backends/nccl/support.h"

#include "tests/backends/nccl/fake_cuda.h"

namespace tessera::nccl_test {
namespace {

class FakeEventState final : public Event::State {
 public:
  explicit FakeEventState(cudaStream_t stream) {
    fake_api().cudaEventCreateWithFlags(&event_, cudaEventDisableTiming);
    fake_api().cudaEventRecord(event_, stream);
  }
  ~FakeEventState() override { fake_api().cudaEventDestroy(event_); }
  bool done() const override { return fake_api().cudaEventQuery(event_) == cudaSuccess; }
  void wait() override {
    const auto until = std::chrono::steady_clock::now() + 30s;
    while (!done()) {
      if (std::chrono::steady_clock::now() > until) throw std::runtime_error("a device does not get on");
      std::this_thread::sleep_for(100us);
    }
  }
  std::int64_t time_ns() override { return 0; }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

FakeDeviceStream::FakeDeviceStream(int device) : DeviceStream({DeviceType::cuda, device}, false) {
  fake_api().cudaSetDevice(device);
  fake_api().cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
}

FakeDeviceStream::~FakeDeviceStream() { fake_api().cudaStreamDestroy(stream_); }

Event FakeDeviceStream::record() { return Event(std::make_shared<FakeEventState>(stream_)); }

void FakeDeviceStream::wait(const Event& event) {
  if (auto* const mine = dynamic_cast<FakeEventState*>(event.state().get()))
    fake_api().cudaStreamWaitEvent(stream_, mine->get(), 0);
  else
    event.wait();
}

void FakeDeviceStream::enqueue(std::function<void()> work) {
  const auto lock = fake_lock();
  stream_of(stream_).tasks.emplace_back([work = std::move(work)] {
    work();
    return true;
  });
}

Event FakeDefaultStream::record() {
  const comm::nccl::DeviceGuard guard(fake_api(), device().index);
  return Event(std::make_shared<FakeEventState>(nullptr));
}

void FakeDefaultStream::wait(const Event& event) { event.wait(); }

void FakeDefaultStream::enqueue(std::function<void()> work) {
  const auto lock = fake_lock();
  default_stream(device().index).tasks.emplace_back([work = std::move(work)] {
    work();
    return true;
  });
}

}  // namespace tessera::nccl_test
