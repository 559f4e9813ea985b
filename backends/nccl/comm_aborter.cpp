#include "backends/nccl/comm_aborter.h"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tessera::comm::nccl {

struct CommAborter::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

std::shared_ptr<CommAborter> CommAborter::start(const NcclApi& api, int device, ncclComm_t comm) {
  auto stopper = std::make_shared<CommAborter>();
  stopper->state_ = std::make_shared<State>();
  const auto abort = [state = stopper->state_, &api, device, comm] {
    api.cudaSetDevice(device);
    api.ncclCommAbort(comm);  // the result does not matter: nothing is left to do
    const std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  };
  try {
    std::thread(abort).detach();
  } catch (const std::system_error&) {  // no thread available
    abort();
  }
  return stopper;
}

bool CommAborter::wait_until(Clock::time_point until) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_until(lock, until, [this] { return state_->done; });
}

}  // namespace tessera::comm::nccl
