#include "tessera/nn/thread_pool.h"

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/thread.h"

namespace tessera::nn {
namespace {
// A kernel's tiles follow each other within microseconds; waking a sleeping thread takes tens of microseconds.
constexpr int kSpins = 2000;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Waits until `value` differs from `old`: spins briefly, then sleeps.
template <class Number>
Number wait_change(const std::atomic<Number>& value, Number old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const Number now = value.load(std::memory_order_acquire);
    if (now != old) return now;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}
}  // namespace

class ThreadPool::Impl {
 public:
  explicit Impl(std::size_t threads) {
    try {
      for (std::size_t worker = 1; worker < threads; ++worker)
        helpers_.push_back(base::start_thread([this, worker] { serve(worker); }));
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Impl() { stop(); }

  void run(std::size_t tiles, Task task, void* function) {
    task_ = task;
    function_ = function;
    tiles_ = tiles;
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    busy_.store(helpers_.size(), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work(0);
    for (std::size_t busy = busy_.load(std::memory_order_acquire); busy != 0;) busy = wait_change(busy_, busy);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void serve(std::size_t worker) {
    std::uint32_t seen = 0;
    while (true) {
      seen = wait_change(generation_, seen);
      if (stopping_.load(std::memory_order_relaxed)) return;
      work(worker);
      if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
    }
  }

  void work(std::size_t worker) noexcept {
    while (!failed_.load(std::memory_order_relaxed)) {
      const std::size_t tile = next_.fetch_add(1, std::memory_order_relaxed);
      if (tile >= tiles_) return;
      try {
        task_(function_, tile, worker);
      } catch (...) {
        const std::scoped_lock lock(error_mutex_);
        if (!error_) error_ = std::current_exception();
        failed_.store(true, std::memory_order_relaxed);
      }
    }
  }

  void stop() noexcept {
    stopping_.store(true, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  // Description of the current run, written before generation_ is incremented.
  Task task_ = nullptr;
  void* function_ = nullptr;
  std::size_t tiles_ = 0;
  // Each has its own cache line, because all threads write them.
  alignas(64) std::atomic<std::size_t> next_{0};
  alignas(64) std::atomic<std::size_t> busy_{0};
  alignas(64) std::atomic<std::uint32_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> helpers_;
};

ThreadPool::ThreadPool(std::size_t threads) : threads_(threads) {
  if (threads < 1) throw base::InvalidUsage("thread pool: 0 threads, needs 1 or more");
  if (threads > 1) impl_ = std::make_unique<Impl>(threads);
}
ThreadPool::~ThreadPool() = default;

void ThreadPool::run(std::size_t tiles, Task task, void* function) { impl_->run(tiles, task, function); }

}  // namespace tessera::nn
