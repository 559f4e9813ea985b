#include "backends/nccl/nccl_comm.h"

#include <algorithm>
#include <condition_variable>
#include <system_error>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {
namespace {

using namespace std::chrono_literals;
constexpr auto kVerdictTime = 500ms;  ///< after a broken connection the control channel names the dead rank
constexpr auto kStopTime = 5s;        ///< in which a device stops after an abort

ncclConfig_t non_blocking() {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;  // contains its version
  config.blocking = 0;
  config.splitShare = 0;  // a failed communicator must not fail those split from it
  return config;
}

}  // namespace

struct NcclComm::Abort {
  std::mutex mutex;
  std::condition_variable changed;
  bool running = false;
};

NcclComm::NcclComm(const NcclApi& api, int device)
    : api_(api), device_(device), config_(non_blocking()), abort_(std::make_shared<Abort>()) {}

NcclComm::~NcclComm() {
  if (comm_ != nullptr) abort();
  wait_aborted();
}

void NcclComm::init(const ncclUniqueId& id, int rank, int size) {
  check(api_.ncclCommInitRankConfig(&comm_, size, id, rank, &config_), "ncclCommInitRankConfig");
}

void NcclComm::split(int color, int key, NcclComm& child) {
  check(api_.ncclCommSplit(comm_, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &child.comm_, &child.config_),
        "ncclCommSplit");
}

ncclResult_t NcclComm::state() const noexcept {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.ncclCommGetAsyncError(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

NcclComm::Health NcclComm::health(std::string& problem) noexcept {
  const ncclResult_t error = state();
  if (error == ncclSuccess || error == ncclInProgress) {
    suspect_since_.reset();
    return Health::ok;
  }
  if (error == ncclRemoteError || error == ncclSystemError) {
    if (!suspect_since_) suspect_since_ = Clock::now();
    if (Clock::now() < *suspect_since_ + kVerdictTime) return Health::suspect;
  }
  problem = format({error, "asynchronous error"});
  return Health::failed;
}

std::string NcclComm::format(const NcclError& error) const {
  std::string text = "nccl: " + std::string(error.function) + ": " + api_.ncclGetErrorString(error.result);
  const char* last = comm_ != nullptr ? api_.ncclGetLastError(comm_) : nullptr;
  if (last != nullptr && *last != '\0') text += " (" + std::string(last) + ")";
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

bool NcclComm::wait_ready(std::unique_lock<std::mutex>& lock, Clock::time_point until) {
  Backoff pause;
  while (comm_ != nullptr) {
    const ncclResult_t result = state();
    if (result == ncclSuccess) return true;
    if (result != ncclInProgress) throw BackendError(format({result, "a communicator"}));
    if (Clock::now() >= until) throw Timeout("nccl: not ready in time");
    lock.unlock();
    pause(1ms);
    lock.lock();
  }
  return false;
}

/// ncclCommAbort ends NCCL's kernels on the device; it may take long or, with a broken driver, never return.
void NcclComm::abort() noexcept {
  {
    const std::lock_guard lock(abort_->mutex);
    abort_->running = true;
  }
  const auto run = [abort = abort_, &api = api_, device = device_, comm = std::exchange(comm_, nullptr)] {
    api.cudaSetDevice(device);
    api.ncclCommAbort(comm);  // the result does not matter: nothing is left to do
    const std::lock_guard lock(abort->mutex);
    abort->running = false;
    abort->changed.notify_all();
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {  // no thread available
    run();
  }
}

bool NcclComm::wait_aborted(Clock::time_point until) {
  std::unique_lock lock(abort_->mutex);
  return abort_->changed.wait_until(lock, until, [this] { return !abort_->running; });
}

bool NcclComm::wait_stopped(const CudaEvent& event) {
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
