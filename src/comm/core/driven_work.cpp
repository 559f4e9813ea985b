#include "tessera/comm/core/driven_work.h"

namespace tessera::comm {

DrivenWork::~DrivenWork() = default;

bool DrivenWork::done() noexcept {
  if (finished.load() != 0) return true;
  engine().try_poll(false);
  return finished.load() != 0;
}

bool DrivenWork::wait_until(Clock::time_point until) {
  if (!engine().wait(finished, until)) return false;
  if (finished.load() == kFailed) throw_failure();
  return true;
}

void DrivenWork::wait() {
  // Terminates: the driving thread fails the operation at its deadline.
  while (!wait_until(Clock::now() + std::chrono::hours(1))) {
  }
}

}  // namespace tessera::comm
