#include "tessera/comm/flight_recorder/recorded_work.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

using flight::State;

void RecordedWork::note(State state, const std::string& failure) {
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  ended_ = state >= State::done;
  if (state == State::failed)
    recorder_->fail(calls_, failure);
  else
    recorder_->set_state(calls_, state);
}

template <class Wait>
bool RecordedWork::watch(Wait wait) {
  note(State::waiting);
  bool ended = false;
  try {
    ended = wait();
  } catch (const Error& error) {
    note(State::failed, std::string(error.kind()) + ": " + error.what());
    throw;
  }
  note(ended ? State::done : State::started);
  return ended;
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
  note(State::handed);
}

void RecordedWork::on_done(WorkCallback callback) {
  inner_.on_done([ref = WorkRef(*this), callback = std::move(callback)](const std::exception_ptr& error) {
    ref->done();  // notes the end
    if (callback) callback(error);
  });
}

}  // namespace tessera::comm
