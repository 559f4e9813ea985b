// Failure of a communicator: once, on all its ranks, with the first cause.
#include <algorithm>

#include "backends/nccl/backoff.h"
#include "backends/nccl/nccl_group.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/format.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kVerdictTime = 500ms;  ///< after a broken connection the control channel names the dead rank
constexpr auto kStopTime = 5s;        ///< in which a device stops after an abort

}  // namespace

std::string NcclGroup::rank_name(int member) const {
  return comm::describe_rank(member, world_->options().job_rank(members_[static_cast<std::size_t>(member)]));
}

std::string NcclGroup::vendor_text_locked(const NcclError& error) const {
  std::string text = "nccl: " + std::string(error.function) + ": " + api_.ncclGetErrorString(error.result);
  const char* last = comm_ != nullptr ? api_.ncclGetLastError(comm_) : nullptr;
  if (last != nullptr && *last != '\0') text += " (" + std::string(last) + ")";
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

ncclResult_t NcclGroup::state_locked() const noexcept {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.ncclCommGetAsyncError(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

NcclGroup::Health NcclGroup::health_locked(Failure& failure) noexcept {
  const ncclResult_t state = state_locked();
  if (state == ncclSuccess || state == ncclInProgress) return Health::well;
  if (state == ncclRemoteError || state == ncclSystemError) {
    if (!suspicious_since_) suspicious_since_ = Clock::now();
    if (Clock::now() < *suspicious_since_ + kVerdictTime) return Health::suspicious;
  }
  const std::string what = in_flight_.empty() ? "" : in_flight_.front()->describe() + ": ";
  failure = {FailureKind::backend, what + vendor_text_locked({state, "asynchronous error"})};
  return Health::broken;
}

/// Whether an operation waits for a member that closed its communicator before it called the operation.
bool NcclGroup::somebody_left_locked(Failure& failure) const {
  for (const NcclOperation* op : in_flight_) {
    if (op->what.sort != NcclOperation::OpClass::ordered || op->what.sequence == 0) continue;
    for (std::size_t k = 0; k < closed_.size(); ++k)
      if (closed_[k] && *closed_[k] < op->what.sequence) {
        failure = {FailureKind::peer_lost,
                   op->describe() + ": " + rank_name(static_cast<int>(k)) + " has closed its communicator"};
        return true;
      }
    return false;  // later operations have later sequence numbers
  }
  return false;
}

/// Completes finished operations and reports the failure, if any.
void NcclGroup::take_through_locked(std::vector<NcclOperation*>& through, Failure& trouble) noexcept {
  std::size_t reached = 0;
  cudaError_t error = cudaSuccess;
  const auto is_through = [&](const NcclOperation& op) {
    return op.recorded && agreed_locked(op) && op.event.reached(error) && error == cudaSuccess;
  };
  while (reached < in_flight_.size() && is_through(*in_flight_[reached])) ++reached;
  // The device may have stopped because of an error that NCCL knows by now.
  const Health health = health_locked(trouble);
  if (health == Health::suspicious) somebody_left_locked(trouble);  // then its name explains the broken connection
  if (health != Health::well) return;
  suspicious_since_.reset();
  if (error != cudaSuccess)
    trouble = {FailureKind::backend, in_flight_[reached]->describe() + ": nccl: " + api_.cudaGetErrorString(error)};
  for (; reached > 0; --reached) {
    NcclOperation* const op = in_flight_.front();
    op->finished.store(NcclOperation::kGood);
    agreements_.erase(op->what.sequence);
    through.push_back(op);
    in_flight_.pop_front();
  }
  if (trouble.kind == FailureKind::none) somebody_left_locked(trouble);
}

void NcclGroup::retire_completed() noexcept {
  std::vector<NcclOperation*> through;
  Failure trouble;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    take_through_locked(through, trouble);
  }
  release_operations(through);
  if (trouble.kind != FailureKind::none) fail(std::move(trouble), true);
}

void NcclGroup::release_operations(std::span<NcclOperation* const> through) noexcept {
  for (NcclOperation* op : through) op->release();
  world_->end_operations(through.size());
}

void NcclGroup::check_health() noexcept {
  retire_completed();
  NcclOperation* late = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    const bool any =
        std::any_of(in_flight_.begin(), in_flight_.end(), [&](const NcclOperation* op) { return now >= op->deadline; });
    if (!any) return;
    late = in_flight_.front();  // it delays the late operation, if it is not late itself
    late->retain();
  }
  time_out(*late);
  late->release();
}

void NcclGroup::time_out(const NcclOperation& op) noexcept {
  const std::lock_guard one_at_a_time(time_out_mutex_);
  const auto over = [&] {
    retire_completed();
    return failed_.load() || op.finished.load() != 0;
  };
  if (over()) return;
  const std::vector<std::optional<std::uint64_t>> at = world_->ask(*this);
  if (over()) return;  // another rank may have reported the cause meanwhile
  std::string behind;
  for (int k = 0; k < size(); ++k) {
    const auto& answer = at[static_cast<std::size_t>(k)];
    if (k == rank_ || (op.what.sort == NcclOperation::OpClass::message && k != op.what.peer)) continue;
    if (!answer) {
      behind += "; " + rank_name(k) + " is not responding";
    } else if (op.what.sort == NcclOperation::OpClass::message) {
      behind += "; " + rank_name(k) + " has not posted the matching send or receive";
    } else if (op.what.sort == NcclOperation::OpClass::ordered && *answer < op.what.sequence) {
      behind += "; " + rank_name(k) + " is behind at operation #" + std::to_string(*answer);
    }
  }
  if (behind.empty()) behind = "; all ranks respond, and it is still under way";
  fail({FailureKind::timeout, op.describe() + ": not done within " + format_duration(op.what.timeout) + behind}, true);
}

void NcclGroup::fail(Failure failure, bool tell) noexcept {
  std::vector<NcclOperation*> over;
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load()) return;
    if (comm_ != nullptr) {
      Failure ignored;
      take_through_locked(over, ignored);  // what completed before the failure has not failed
      stopper_ = CommAborter::start(api_, world_->device(), std::exchange(comm_, nullptr));
    }
    failure_ = std::move(failure);
    failed_.store(true);
    for (NcclOperation* op : in_flight_) op->finished.store(NcclOperation::kFailed);
    over.insert(over.end(), in_flight_.begin(), in_flight_.end());
    in_flight_.clear();
  }
  if (tell)
    world_->tell(*this, {.kind = ControlMessage::Kind::failure,
                         .communicator = id_,
                         .number = static_cast<std::uint64_t>(failure_.kind),
                         .text = failure_.cause});
  if (options_.logger != nullptr) options_.logger->write(LogLevel::debug, failure_.cause);
  release_operations(over);
}

void NcclGroup::abort(std::string_view reason) noexcept {
  fail({FailureKind::aborted, rank_name(rank_) + " aborted: " + std::string(reason)}, true);
}

int NcclGroup::member_of(int world_rank) const noexcept {
  const auto found = std::find(members_.begin(), members_.end(), world_rank);
  return found == members_.end() ? -1 : static_cast<int>(found - members_.begin());
}

void NcclGroup::lose(int world_rank) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  std::string what;
  {
    const std::lock_guard lock(mutex_);
    if (!in_flight_.empty()) what = in_flight_.front()->describe() + ": ";
  }
  fail({FailureKind::peer_lost, what + rank_name(member) + " died"}, true);
}

void NcclGroup::hear_closing(int world_rank, std::uint64_t called) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  const std::lock_guard lock(mutex_);
  closed_[static_cast<std::size_t>(member)] = called;
}

Clock::time_point NcclGroup::stop_deadline() const noexcept {
  return does_not_stop_.load() ? Clock::now() : Clock::now() + kStopTime;
}

void NcclGroup::throw_failure(const NcclOperation* op) {
  Failure failure;
  std::shared_ptr<CommAborter> stopper;
  {
    const std::lock_guard lock(mutex_);
    failure = failure_;
    stopper = stopper_;
  }
  if (op != nullptr) {
    const Clock::time_point until = stop_deadline();
    bool stopped = stopper == nullptr || stopper->wait_until(until);
    Backoff pause;
    cudaError_t error = cudaSuccess;
    while (stopped && !op->event.reached(error)) {
      stopped = Clock::now() < until;
      pause(1ms);
    }
    if (!stopped) does_not_stop_.store(true);
    if (!stopped) failure.cause += " (and the device has not stopped: its memory may still change)";
  }
  comm::throw_failure(failure);
}

}  // namespace tessera::comm::nccl
