#include "tessera/comm/completion_poller.h"

#include <list>
#include <utility>

#include "tessera/base/thread.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm {

void CompletionPoller::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void CompletionPoller::add(WorkState& state, WorkCallback callback) {
  if (state.done()) {
    if (callback) callback(error_of(state));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    added_.push_back({WorkRef(state), std::move(callback)});
    if (!thread_.joinable()) thread_ = base::start_thread([this] { run(); });
  }
  changed_.notify_one();
}

void CompletionPoller::run() noexcept {
  using namespace std::chrono_literals;
  std::list<Pending> pending;
  Backoff pause;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !added_.empty() || !pending.empty(); });
      if (!added_.empty()) pause.reset();
      for (Pending& one : added_) pending.push_back(std::move(one));
      added_.clear();
      if (pending.empty()) return;
    }
    const std::size_t ended = std::erase_if(pending, [](Pending& one) {
      const bool done = one.state->done();
      if (done && one.callback) one.callback(error_of(*one.state));
      return done;
    });
    if (ended > 0) pause.reset();
    if (!pending.empty()) pause(500us);
  }
}

}  // namespace tessera::comm
