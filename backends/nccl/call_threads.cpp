#include "backends/nccl/call_threads.h"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/thread.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm::nccl {
namespace {

/// A thread looks for its next call so often before it sleeps: calls of a training step follow one another within
/// microseconds, and to wake a thread takes longer than that.
constexpr int kTurnsBeforeSleep = 200;

}  // namespace

struct CallThreads::Worker {
  std::thread thread;
  std::shared_ptr<Call> next;  ///< guarded by the state
  bool busy = true;            ///< from the assignment of a call to its end; guarded by the state
  std::atomic<bool> has_next{false};
  std::condition_variable wake;
};

struct CallThreads::State {
  std::function<void()> prepare;  ///< does not change
  std::mutex mutex;
  bool stop = false;
  std::vector<std::unique_ptr<Worker>> workers;
};

CallThreads::CallThreads(std::function<void()> prepare) : state_(std::make_shared<State>()) {
  state_->prepare = std::move(prepare);
}

CallThreads::~CallThreads() {
  std::vector<std::thread> idle;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    for (const auto& worker : state_->workers) {
      worker->wake.notify_all();
      if (worker->busy)
        worker->thread.detach();
      else
        idle.push_back(std::move(worker->thread));
    }
  }
  for (std::thread& thread : idle) thread.join();
}

std::shared_ptr<const CallThreads::Call> CallThreads::start(std::function<void()> what) {
  auto call = std::make_shared<Call>(std::move(what));
  const std::lock_guard lock(state_->mutex);
  auto& workers = state_->workers;
  const auto idle = std::ranges::find_if(workers, [](const auto& worker) { return !worker->busy; });
  Worker* worker = idle == workers.end() ? nullptr : idle->get();
  if (worker == nullptr) {
    auto made = std::make_unique<Worker>();
    worker = made.get();
    made->thread = base::start_thread([state = state_, worker] { run(*state, *worker); });
    workers.push_back(std::move(made));
  }
  worker->busy = true;
  worker->next = call;
  worker->has_next.store(true, std::memory_order_release);
  worker->wake.notify_one();
  return call;
}

int CallThreads::count() const {
  const std::lock_guard lock(state_->mutex);
  return static_cast<int>(state_->workers.size());
}

void CallThreads::run(State& state, Worker& worker) {
  bool prepared = state.prepare == nullptr;
  while (true) {
    for (int turn = 0; turn < kTurnsBeforeSleep && !worker.has_next.load(std::memory_order_acquire); ++turn)
      ::sched_yield();
    std::shared_ptr<Call> call;
    {
      std::unique_lock lock(state.mutex);
      worker.wake.wait(lock, [&] { return worker.next != nullptr || state.stop; });
      call = std::move(worker.next);
      worker.has_next.store(false, std::memory_order_relaxed);
    }
    if (call == nullptr) return;
    try {
      if (!prepared) state.prepare();
      prepared = true;
      call->what_();
    } catch (...) {
      call->error_ = std::current_exception();
    }
    call->what_ = nullptr;  // before the caller goes on: it may hold what the caller then destroys
    {
      const std::lock_guard lock(state.mutex);
      worker.busy = false;  // before the caller goes on: its next call finds this thread
    }
    call->done_.store(true, std::memory_order_release);
  }
}

}  // namespace tessera::comm::nccl
