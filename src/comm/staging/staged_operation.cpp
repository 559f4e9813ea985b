#include "tessera/comm/staging/staged_operation.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/staging/communicator.h"

namespace tessera::comm::staging {
namespace {

constexpr std::chrono::seconds kStopTime{5};  ///< in which a device stops after an operation has expired
constexpr std::string_view kNoResponse = "the device did not respond";

}  // namespace

StagedOperation::StagedOperation(std::shared_ptr<StagingPipeline> engine, StagedCommunicator& communicator,
                                 std::span<const OpDesc> calls, Event after)
    : engine_(std::move(engine)),
      communicator_(communicator),
      deadline_(Clock::now() + calls.front().timeout),
      timeout_(calls.front().timeout),
      name_(calls.size() == 1 ? name_of(calls.front().kind) : "batch"),
      label_(calls.front().label),
      after_(std::move(after)),
      signal_(engine_->device().make_signal()),
      reached_(signal_->arm()) {
  for (const OpDesc& call : calls) parts_.emplace_back(*this, call, on_device(call));
}

bool StagedOperation::done() noexcept {
  if (!finished()) engine_->try_advance();
  return finished();
}

bool StagedOperation::wait_until(Clock::time_point until) {
  const Clock::time_point last = deadline_ + DeadlineWatch::kGrace + kStopTime;
  if (!engine_->poll_until([this] { return finished(); }, std::min(until, last))) {
    if (Clock::now() < last) return false;
    throw Timeout(late(kNoResponse) + " (and the device has not stopped: its memory may still change)");
  }
  if (finished_.load() == kFailed) std::rethrow_exception(error_);
  return true;
}

void StagedOperation::wait() { wait_until(Clock::time_point::max()); }  // terminates: it fails at its deadline

void StagedOperation::wait_on(Stream& stream) {
  if (stream.device().type == DeviceType::cpu) return WorkState::wait_on(stream);
  if (!finished()) return stream.wait(reached_);
  if (finished_.load() == kFailed) std::rethrow_exception(error_);
}

void StagedOperation::on_done(WorkCallback callback) { communicator_.completions().add(*this, std::move(callback)); }

std::chrono::milliseconds StagedOperation::time_left() const {
  return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()),
                  std::chrono::milliseconds(1));
}

bool StagedOperation::advance() noexcept {
  bool moved = false;
  if (error_ == nullptr) {
    try {
      moved = begun() && advance_parts();
      check_deadline();
    } catch (...) {
      fail(std::current_exception());
    }
  }
  const auto over = [this](StagedTransfer& part) { return error_ == nullptr ? part.done() : part.drained(); };
  // Not std::all_of, which would stop early: drain every part that can be drained.
  std::size_t left = 0;
  for (StagedTransfer& part : parts_) left += over(part) ? 0 : 1;
  if (left == 0) finish();
  return moved || left == 0;
}

bool StagedOperation::begun() {
  if (begun_) return true;
  try {
    begun_ = communicator_.aborted() || after_.done();
  } catch (const std::exception& error) {
    communicator_.abort_inner(error.what());
    throw;
  }
  if (begun_) after_ = {};
  return begun_;
}

bool StagedOperation::advance_parts() {
  bool moved = false;
  for (StagedTransfer& part : parts_) {
    const bool waited = !part.issued();
    moved |= part.advance(waited && communicator_.may_issue(part));
    if (waited && part.issued()) communicator_.leave(part);
  }
  return moved;
}

void StagedOperation::check_deadline() {
  if (Clock::now() < deadline_) return;
  const auto moving = [](const StagedTransfer& part) { return part.moving(); };
  if (std::ranges::any_of(parts_, moving)) return;  // it has its own deadline and names the late ranks
  const std::string why = late(begun_ ? "device memory was not copied" : "its stream did not reach the operation");
  communicator_.abort_inner(why);
  throw Timeout(why);
}

/// "all_reduce (block.3): WHAT within 5 s".
std::string StagedOperation::late(std::string_view what) const {
  return name_ + (label_.empty() ? "" : " (" + label_ + ")") + ": " + std::string(what) + " within " +
         format_duration(timeout_);
}

void StagedOperation::expire() noexcept {
  expired_.store(true);
  communicator_.abort_inner(late(kNoResponse));
  signal_->set();
}

void StagedOperation::fail(std::exception_ptr error) noexcept {
  error_ = expired_.load() ? std::make_exception_ptr(Timeout(late(kNoResponse))) : std::move(error);
  for (StagedTransfer& part : parts_) communicator_.leave(part);
}

void StagedOperation::finish() noexcept {
  engine_->watch().remove(*this);
  for (StagedTransfer& part : parts_) part.release_regions();
  communicator_.end_operation();
  signal_->set();
  finished_.store(error_ == nullptr ? kGood : kFailed);
}

}  // namespace tessera::comm::staging
