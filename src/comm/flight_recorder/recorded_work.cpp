#include "tessera/comm/flight_recorder/recorded_work.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

using flight::State;

template <class Wait>
bool RecordedWork::watch(Wait wait) {
  if (ended_) return wait();
  recorder_->set_state(calls_, State::waiting);
  try {
    ended_ = wait();
  } catch (const Error& error) {
    ended_ = true;
    recorder_->fail(calls_, std::string(error.kind()) + ": " + error.what());
    throw;
  }
  recorder_->set_state(calls_, ended_ ? State::done : State::started);
  return ended_;
}

bool RecordedWork::done() noexcept {
  if (!inner_.done()) return false;
  try {
    wait();
  } catch (const std::exception&) {  // which waiting throws again
  }
  return true;
}

bool RecordedWork::wait_until(std::chrono::steady_clock::time_point until) {
  return watch([&] { return inner_.wait_until(until); });
}

void RecordedWork::wait() {
  watch([&] {
    inner_.wait();
    return true;
  });
}

void RecordedWork::wait_on(Stream& stream) {
  if (stream.device().type == DeviceType::cpu) return WorkState::wait_on(stream);
  inner_.wait_on(stream);
  recorder_->set_state(calls_, State::handed);
  ended_ = true;
}

void RecordedWork::on_done(WorkCallback callback) {
  inner_.on_done([ref = WorkRef(*this), callback = std::move(callback)](const std::exception_ptr& error) {
    ref->done();  // notes the end
    if (callback) callback(error);
  });
}

}  // namespace tessera::comm
