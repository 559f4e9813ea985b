#include "tessera/comm/work.h"

#include <list>
#include <utility>

#include "tessera/base/thread.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm {

WorkState::~WorkState() = default;

void WorkState::wait_on(Stream& stream) {
  stream.run([ref = WorkRef(*this)] { ref->wait(); });
}

std::exception_ptr error_of(WorkState& ended) noexcept {
  try {
    ended.wait();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    finish();
    state_ = std::exchange(other.state_, nullptr);
    handed_ = std::exchange(other.handed_, false);
  }
  return *this;
}

void Work::on_done(WorkCallback callback) {
  if (state_ != nullptr) return state_->on_done(std::move(callback));
  callback(nullptr);
}

void Work::detach() noexcept {
  if (state_ == nullptr) return;
  try {
    state_->on_done({});
  } catch (...) {  // no memory: then the destructor waits
    return finish();
  }
  std::exchange(state_, nullptr)->release();
  handed_ = false;
}

void Work::finish() noexcept {
  if (state_ == nullptr) return;
  if (state_->is_parents()) {
    state_ = nullptr;
    return;
  }
  if (!handed_) {
    try {
      state_->wait();
    } catch (...) {  // the communicator stores it and throws it at the next call
    }
  }
  std::exchange(state_, nullptr)->release();
  handed_ = false;
}

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
