#include "tests/harness/guarded_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::harness {
namespace {

using namespace base;  // NOLINT: this file implements a class of base

/// One range of addresses that is opened and closed as a whole.
class Arena {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;
  Arena() {
    void* data = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw system_error("mmap");
    base_ = static_cast<std::byte*>(data);
  }
  ~Arena() { ::munmap(base_, kBytes); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* take(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    const auto found = idle_.find(size);
    if (found != idle_.end()) {
      void* data = found->second;
      idle_.erase(found);
      return data;
    }
    if (used_ + size > kBytes) throw SystemError("the guarded device has no more memory");
    used_ += size;
    return base_ + used_ - size;
  }
  void give(void* data, std::size_t bytes) { idle_.emplace(rounded(bytes), data); }

  void open() {
    if (depth_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--depth_ == 0) protect(PROT_NONE);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t rounded(std::size_t bytes) {
    return (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  }
  void protect(int rights) const {
    if (used_ > 0 && ::mprotect(base_, used_, rights) != 0) throw system_error("mprotect");
  }
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
  int depth_ = 0;
  std::multimap<std::size_t, void*> idle_;
};

class OpenArena {
 public:
  explicit OpenArena(Arena& arena) : arena_(arena) { arena_.open(); }
  ~OpenArena() { arena_.close(); }
  OpenArena(const OpenArena&) = delete;
  OpenArena& operator=(const OpenArena&) = delete;

 private:
  Arena& arena_;
};

/// What all streams of a device share. Its lock is held while anything of the device works.
struct Shared {
  std::recursive_mutex mutex;
  Arena arena;
};

class Reached final : public Event::State {
 public:
  bool done() const override { return true; }
  void wait() override {}
  std::int64_t time_ns() override { return time_; }

 private:
  const std::int64_t time_ = host_time_ns();
};

/// Runs work at once, with the memory open.
class GuardedStream final : public Stream {
 public:
  GuardedStream(Device device, std::shared_ptr<Shared> shared) : Stream(device, false), shared_(std::move(shared)) {}
  Event record() override { return Event(std::make_shared<Reached>()); }
  void wait(const Event& event) override { event.wait(); }

 protected:
  void enqueue(std::function<void()> work) override {
    const std::lock_guard lock(shared_->mutex);
    const OpenArena open(shared_->arena);
    work();
  }

 private:
  const std::shared_ptr<Shared> shared_;
};

/// Work that runs when somebody asks. Under the device's lock.
struct LazyWork {
  explicit LazyWork(std::shared_ptr<Shared> device) : shared(std::move(device)) {}
  void run() {
    if (running || tasks.empty()) return;  // running: it waits for itself
    running = true;
    const OpenArena open(shared->arena);
    while (!tasks.empty() && tasks.front()()) tasks.pop_front();
    running = false;
  }
  const std::shared_ptr<Shared> shared;
  std::deque<std::function<bool()>> tasks;  ///< false: not yet, ask again
  bool running = false;
};

class LazyPoint final : public Event::State {
 public:
  explicit LazyPoint(std::shared_ptr<LazyWork> work) : work_(std::move(work)) {}
  void reach() { time_ = host_time_ns(); }
  bool done() const override {
    const std::lock_guard lock(work_->shared->mutex);
    if (time_ == 0) work_->run();
    return time_ != 0;
  }
  void wait() override {
    const std::int64_t until = host_time_ns() + kPatience;
    while (!done()) {
      if (host_time_ns() > until) throw BackendError("the guarded device does not get on");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::int64_t time_ns() override {
    wait();
    return time_;
  }

 private:
  static constexpr std::int64_t kPatience = 60'000'000'000;
  const std::shared_ptr<LazyWork> work_;
  std::int64_t time_ = 0;
};

class LazyGuardedStream final : public Stream {
 public:
  LazyGuardedStream(Device device, const std::shared_ptr<Shared>& shared)
      : Stream(device, false), work_(std::make_shared<LazyWork>(shared)) {}
  ~LazyGuardedStream() override {
    const std::lock_guard lock(work_->shared->mutex);
    work_->run();
  }
  Event record() override {
    auto point = std::make_shared<LazyPoint>(work_);
    push([weak = std::weak_ptr(point)] {
      if (const auto reached = weak.lock()) reached->reach();
      return true;
    });
    return Event(point);
  }
  void wait(const Event& event) override {
    push([event] { return event.done(); });
  }

 protected:
  void enqueue(std::function<void()> work) override {
    push([work = std::move(work)] {
      work();
      return true;
    });
  }

 private:
  void push(std::function<bool()> task) {
    const std::lock_guard lock(work_->shared->mutex);
    work_->tasks.push_back(std::move(task));
  }
  const std::shared_ptr<LazyWork> work_;
};

class GuardedRuntime final : public DeviceRuntime {
 public:
  explicit GuardedRuntime(GuardedOptions options)
      : DeviceRuntime({DeviceType::cuda, 0}, {.host_accessible = false, .slow_allocation = true}),
        entry_{options.kernels != nullptr ? options.kernels : nn::make_host_kernels},
        lazy_(options.lazy) {}

  DeviceProperties properties() const override {
    return {.name = "guarded memory of the host", .memory_bytes = Arena::kBytes};
  }
  std::unique_ptr<Stream> make_stream() override {
    if (lazy_) return std::make_unique<LazyGuardedStream>(device(), shared_);
    return std::make_unique<GuardedStream>(device(), shared_);
  }

  void* allocate(std::size_t bytes) override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->arena.take(bytes);
  }
  void free(void* data, std::size_t bytes) noexcept override {
    const std::lock_guard lock(shared_->mutex);
    shared_->arena.give(data, bytes);
  }
  void* allocate_host(std::size_t bytes) override { return std::malloc(bytes); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }
  void copy(Stream& stream, CopyDirection, void* to, const void* from, std::size_t bytes) override {
    stream.run([=] { std::memcpy(to, from, bytes); });
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    stream.run([=] { std::memset(data, value, bytes); });
  }
  void synchronize() override {}
  const void* find(std::string_view interface) const noexcept override {
    return interface == nn::KernelsEntry::kInterface ? &entry_ : nullptr;
  }

 private:
  const nn::KernelsEntry entry_;
  const bool lazy_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace

std::shared_ptr<DeviceRuntime> make_guarded_device(GuardedOptions options) {
  return std::make_shared<GuardedRuntime>(options);
}

}  // namespace tessera::harness
