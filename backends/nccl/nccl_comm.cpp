#include "backends/nccl/nccl_comm.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/thread.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kCallTime = 100ms;  ///< in which a call returns unless it waits for another rank
constexpr auto kRevokeTime = 1s;   ///< in which a revoked call returns
constexpr auto kStopTime = 5s;     ///< in which a device stops after an abort

ncclConfig_t make_config(const NcclApi& api) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;  // contains its version
  config.blocking = api.ncclCommRevoke != nullptr ? 1 : 0;
  config.splitShare = 1;  // ncclCommSplit() makes duplicates only
  return config;
}

}  // namespace

/// The handle is written by NCCL, which may still be at it when a call is given up, so it is read atomically.
struct NcclComm::Shared {
  explicit Shared(const NcclApi& api) : config(make_config(api)) {}

  mutable std::mutex mutex;
  std::condition_variable changed;
  ncclConfig_t config;
  ncclComm_t comm = nullptr;
  bool ready = false;     ///< created
  bool calling = false;   ///< a call is in progress
  bool ended = false;     ///< destroyed, or being aborted: no more calls
  bool aborting = false;  ///< the thread that aborts has not returned
  bool leaked = false;    ///< not aborted, since a call has not returned
  bool left = false;      ///< no call is inside any more, or none returns
  std::optional<Clock::time_point> suspect_since;

  ncclComm_t handle() const noexcept { return __atomic_load_n(&comm, __ATOMIC_ACQUIRE); }
};

NcclComm::Guard::Guard(NcclComm& comm) : shared_(*comm.shared_) {
  std::unique_lock lock(shared_.mutex);
  shared_.changed.wait(lock, [this] { return !shared_.calling || shared_.ended; });
  if (shared_.ended) throw NcclError{ncclInvalidUsage, "a communicator that has ended"};
  shared_.calling = true;
  handle_ = shared_.comm;
}

NcclComm::Guard::~Guard() {
  const std::lock_guard lock(shared_.mutex);
  shared_.calling = false;
  shared_.changed.notify_all();
}

NcclComm::NcclComm(const NcclApi& api, int device)
    : api_(api), device_(device), shared_(std::make_shared<Shared>(api)) {}

NcclComm::~NcclComm() {
  abort();
  wait_aborted();
}

void NcclComm::gather_by_copy_engines() noexcept {
#ifdef NCCL_CTA_POLICY_ZERO
  if (api_.gathers_by_copy_engines()) shared_->config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
}

void NcclComm::init(const ncclUniqueId& id, int rank, int size) {
  const Guard guard(*this);
  check(api_.ncclCommInitRankConfig(&shared_->comm, size, id, rank, &shared_->config), "ncclCommInitRankConfig");
  wait_complete("ncclCommInitRankConfig");
  set_ready();
}

void NcclComm::begin_copy(ncclComm_t original, int rank) {
  const Guard guard(*this);
  check(api_.ncclCommSplit(original, 0, rank, &shared_->comm, &shared_->config), "ncclCommSplit");
}

void NcclComm::finish_copy() {
  const Guard guard(*this);
  wait_complete("ncclCommSplit");
  set_ready();
}

void NcclComm::destroy() {
  const Guard guard(*this);
  check(api_.ncclCommFinalize(guard.handle()), "ncclCommFinalize");
  wait_complete("ncclCommFinalize");
  {
    const std::lock_guard lock(shared_->mutex);
    if (std::exchange(shared_->ended, true)) return;  // it is being aborted
    shared_->comm = nullptr;
  }
  check(api_.ncclCommDestroy(guard.handle()), "ncclCommDestroy");
}

/// NCCL_COMM_BLOCKING=0 in the environment makes all communicators non-blocking.
void NcclComm::wait_complete(const char* function) {
  Backoff pause;
  for (ncclResult_t state = ncclInProgress; true; pause(1ms)) {
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->ended) throw NcclError{ncclInvalidUsage, "a communicator that has ended"};
      check(api_.ncclCommGetAsyncError(shared_->handle(), &state), "ncclCommGetAsyncError");
      if (!shared_->ready) check(state, function);  // errors of later operations are health()'s
    }
    if (state != ncclInProgress) return;
  }
}

void NcclComm::set_ready() {
  const std::lock_guard lock(shared_->mutex);
  shared_->ready = true;
}

bool NcclComm::usable() const noexcept {
  const std::lock_guard lock(shared_->mutex);
  return shared_->ready && !shared_->ended;
}

NcclComm::Health NcclComm::health(std::string& problem) noexcept {
  ncclResult_t error = ncclSuccess;
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->ready || shared_->ended) return Health::ok;
    const ncclResult_t asked = api_.ncclCommGetAsyncError(shared_->comm, &error);
    if (asked != ncclSuccess) error = asked;
    if (error == ncclSuccess || error == ncclInProgress) {
      shared_->suspect_since.reset();
      return Health::ok;
    }
    if (error == ncclRemoteError || error == ncclSystemError) {
      if (!shared_->suspect_since) shared_->suspect_since = Clock::now();
      if (Clock::now() < *shared_->suspect_since + kVerdictTime) return Health::suspect;
    }
  }
  problem = format({error, "asynchronous error"});
  return Health::failed;
}

std::string NcclComm::format(const NcclError& error) const {
  std::string text = "nccl: " + std::string(error.function) + ": " + api_.ncclGetErrorString(error.result);
  const std::lock_guard lock(shared_->mutex);
  const char* last = shared_->ready && !shared_->ended ? api_.ncclGetLastError(shared_->comm) : nullptr;
  if (last != nullptr && *last != '\0') text += " (" + std::string(last) + ")";
  std::ranges::replace(text, '\n', ' ');
  return text;
}

/// ncclCommAbort ends NCCL's kernels on the device and makes a creation return that waits for other ranks. It also
/// frees the communicator: a call that is inside it would use freed memory. Hence this order, in a thread of its own,
/// since the last step may take long or, with a broken driver, never end:
///
///   1. `ended` is set: no call begins any more, and none looks at the handle without the lock.
///   2. A call that is inside gets kCallTime to return by itself, as most do.
///   3. ncclCommRevoke, where the library has it, makes a blocking call return and leaves the communicator allocated.
///      It needs a complete communicator, so one that is being made is not revoked: its abort makes the creation
///      return, and the creation is the one call that NCCL lets an abort overtake.
///   4. A call that is still inside a complete communicator after that never returns. Freeing the communicator would
///      be worse than keeping it: it is leaked, with one warning.
///   5. ncclCommAbort, once all that share resources with the communicator have come so far: an abort of one of them
///      ends all. Then the creation that it has released.
///
/// Kernels on the device end during 5 only. What frees memory that they use waits for that by wait_stopped().
void NcclComm::abort() noexcept {
  NcclComm* const self = this;
  abort({&self, 1});
}

void NcclComm::abort(std::span<NcclComm* const> family) noexcept {
  std::vector<NcclComm*> ended;
  std::vector<std::shared_ptr<Shared>> all;
  for (NcclComm* const one : family) {
    if (!one->end()) continue;
    ended.push_back(one);
    all.push_back(one->shared_);
  }
  for (NcclComm* const one : ended) {
    const auto run = [shared = one->shared_, &api = one->api_, device = one->device_, all] {
      run_abort(api, device, *shared, all);
    };
    try {
      base::start_thread(run).detach();
    } catch (const SystemError&) {  // no thread available
      run();
    }
  }
}

bool NcclComm::end() noexcept {
  const std::lock_guard lock(shared_->mutex);
  const bool aborts = !shared_->ended && (shared_->handle() != nullptr || shared_->calling);
  shared_->ended = true;
  if (aborts) shared_->aborting = true;
  shared_->changed.notify_all();
  return aborts;
}

void NcclComm::run_abort(const NcclApi& api, int device, Shared& shared,
                         std::span<const std::shared_ptr<Shared>> family) noexcept {
  const DeviceGuard guard(api, device, std::nothrow);
  std::unique_lock lock(shared.mutex);
  const auto returned = [&](auto within) {
    return shared.changed.wait_for(lock, within, [&] { return !shared.calling; });
  };
  if (!returned(kCallTime) && shared.ready && api.ncclCommRevoke != nullptr) {
    lock.unlock();
    api.ncclCommRevoke(shared.handle(), 0);
    lock.lock();
    returned(kRevokeTime);
  }
  shared.leaked = shared.calling && shared.ready;
  shared.left = true;
  shared.changed.notify_all();
  lock.unlock();
  const Clock::time_point until = Clock::now() + kCallTime + kRevokeTime;
  for (const std::shared_ptr<Shared>& one : family) {
    std::unique_lock of_one(one->mutex);
    one->changed.wait_until(of_one, until, [&] { return one->left; });
  }
  // The results do not matter: nothing is left to do.
  if (const ncclComm_t comm = shared.handle(); comm != nullptr && !shared.leaked) api.ncclCommAbort(comm);
  lock.lock();
  if (!shared.leaked) returned(kRevokeTime);
  shared.aborting = false;
  shared.changed.notify_all();
}

bool NcclComm::wait_aborted() {
  const bool aborted = wait_aborted(stop_deadline());
  if (!aborted) does_not_stop_.store(true);
  return aborted;
}

bool NcclComm::wait_aborted(Clock::time_point until) {
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_until(lock, until, [this] { return shared_->ended && !shared_->aborting; }) &&
         !shared_->leaked;
}

bool NcclComm::wait_stopped(const CudaEvent& event) {
  const DeviceGuard guard(api_, device_, std::nothrow);
  const Clock::time_point until = stop_deadline();
  bool stopped = wait_aborted(until);
  Backoff pause;
  cudaError_t error = cudaSuccess;
  while (stopped && !event.reached(error)) {
    stopped = Clock::now() < until;
    pause(1ms);
  }
  if (!stopped) does_not_stop_.store(true);
  return stopped;
}

Clock::time_point NcclComm::stop_deadline() const noexcept {
  return does_not_stop_.load() ? Clock::now() : Clock::now() + kStopTime;
}

}  // namespace tessera::comm::nccl
