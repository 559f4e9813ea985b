#include "tessera/base/device/host_waits.h"

#include <utility>

namespace tessera::base {

void HostWaits::add(Event event) {
  const std::lock_guard lock(mutex_);
  std::erase_if(unset_, [](const Event& one) { return one.done(); });
  if (unset_.empty()) behind_.store(0);
  unset_.push_back(std::move(event));
  any_.store(true);
}

void HostWaits::wait_all() {
  if (!any_.load()) return;
  std::vector<Event> waited;
  {
    const std::lock_guard lock(mutex_);
    waited = unset_;
  }
  for (const Event& event : waited) event.wait();
  const std::lock_guard lock(mutex_);
  std::erase_if(unset_, [](const Event& one) { return one.done(); });
  behind_.store(0);
  any_.store(!unset_.empty());
}

void HostWaits::count_work() {
  if (any_.load(std::memory_order_relaxed) && behind_.fetch_add(1, std::memory_order_relaxed) >= kMaxRunAhead)
    wait_all();
}

}  // namespace tessera::base
