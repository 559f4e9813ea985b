// An operation whose states the flight recorder notes.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "tessera/comm/flight_recorder/recorder.h"
#include "tessera/comm/work.h"

namespace tessera::comm {

class RecordedWork final : public WorkState {
 public:
  RecordedWork(Work inner, std::shared_ptr<FlightRecorder> recorder, FlightRecorder::Calls calls)
      : inner_(std::move(inner)), recorder_(std::move(recorder)), calls_(calls) {}

  bool done() noexcept override;
  bool wait_until(std::chrono::steady_clock::time_point until) override;
  void wait() override;
  void wait_on(Stream& stream) override;
  void on_done(WorkCallback callback) override;

 private:
  ~RecordedWork() override = default;
  void recycle() noexcept override { delete this; }
  /// Calls `wait`, which returns whether the operation has ended, or throws its error.
  template <class Wait>
  bool watch(Wait wait);
  /// Notes a state, unless the end is noted: a waiting thread and a callback may both see it.
  void note(flight::State state, const std::string& failure = {});

  Work inner_;
  const std::shared_ptr<FlightRecorder> recorder_;
  const FlightRecorder::Calls calls_;
  std::mutex mutex_;
  bool ended_ = false;  // and its end is noted; guarded by mutex_
};

}  // namespace tessera::comm
