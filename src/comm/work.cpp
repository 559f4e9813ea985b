#include "tessera/comm/work.h"

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

}  // namespace tessera::comm
