#include "tessera/comm/slow_link/ports.h"

#include <algorithm>
#include <utility>

namespace tessera::comm {

void Ports::add(std::shared_ptr<Transfer> transfer) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(transfer));
  serve();
}

void Ports::remove(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const auto& one) { return one.get() == &transfer; });
}

std::optional<CallTimes::TimePoint> Ports::done_at(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  serve();
  return transfer.done;
}

/// Those that all ranks have called, in the order of their last calls; the others come later.
void Ports::serve() {
  std::vector<std::pair<CallTimes::TimePoint, Transfer*>> come;
  for (const auto& transfer : waiting_) {
    const auto last = transfer->times == nullptr ? std::optional(transfer->called)
                                                 : transfer->times->last(transfer->number, transfer->use.senders);
    if (last) come.emplace_back(std::max(*last, transfer->called), transfer.get());
  }
  std::ranges::stable_sort(come, [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [time, transfer] : come) {
    transfer->begun = time;
    CallTimes::TimePoint through = time;
    for (std::size_t port = 0; port < kPorts; ++port) {
      if (transfer->use.occupied[port].count() == 0) continue;
      free_[port] = std::max(time, free_[port]) + transfer->use.occupied[port];
      through = std::max(through, free_[port]);
    }
    transfer->done = through + transfer->use.latency;
  }
  std::erase_if(waiting_, [](const auto& transfer) { return transfer->done.has_value(); });
}

}  // namespace tessera::comm
