#include "tessera/comm/work.h"

namespace tessera::comm {

WorkState::~WorkState() = default;

namespace {

/// A copyable handle, which std::function requires.
class Handle {
 public:
  explicit Handle(WorkState* state) : state_(state) { state_->retain(); }
  Handle(const Handle& other) : state_(other.state_) { state_->retain(); }
  Handle& operator=(const Handle&) = delete;
  ~Handle() { state_->release(); }
  void wait() const { state_->wait(); }

 private:
  WorkState* state_;
};

}  // namespace

void WorkState::wait_on(Stream& stream) {
  stream.run([handle = Handle(this)] { handle.wait(); });
}

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    finish();
    state_ = std::exchange(other.state_, nullptr);
    handed_ = std::exchange(other.handed_, false);
  }
  return *this;
}

void Work::finish() noexcept {
  if (state_ == nullptr) return;
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
