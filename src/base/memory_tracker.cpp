#include "tessera/base/memory_tracker.h"

#include <algorithm>
#include <utility>

#include "tessera/base/stream.h"

namespace tessera::base {
namespace {
constexpr std::array<std::string_view, kMemoryUses> kNames = {
    "parameter",          "gradient",      "optimizer", "activation", "unsharded_parameter",
    "unsharded_gradient", "communication", "other",     "offloaded"};
}

std::string_view name_of(MemoryCategory use) { return kNames[static_cast<std::size_t>(use)]; }

void MemoryTracker::note(MemoryCategory use, std::int64_t change) noexcept {
  if (!keeps_history_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(history_mutex_);
  history_.changes.push_back({history_clock_ ? history_clock_() : host_time_ns(), use, change});
}

void MemoryTracker::keep_history(bool keep, std::function<std::int64_t()> clock) {
  const std::lock_guard lock(history_mutex_);
  history_ = {};
  history_clock_ = std::move(clock);
  for (std::size_t i = 0; i < kMemoryUses; ++i) history_.before[i] = now_[i].load(std::memory_order_relaxed);
  keeps_history_.store(keep, std::memory_order_relaxed);
}

MemoryHistory MemoryTracker::drain_history() {
  const std::lock_guard lock(history_mutex_);
  MemoryHistory taken = std::exchange(history_, {});
  history_.before = taken.before;
  for (const MemoryChange& change : taken.changes)
    history_.before[static_cast<std::size_t>(change.use)] += change.bytes;
  return taken;
}

bool MemoryTracker::raise(Counter& peak, std::int64_t value) noexcept {
  std::int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
  return seen < value;
}

void MemoryTracker::add(MemoryCategory use, std::size_t bytes) noexcept {
  const auto change = static_cast<std::int64_t>(bytes);
  const auto index = static_cast<std::size_t>(use);
  note(use, change);
  raise(peak_[index], now_[index].fetch_add(change, std::memory_order_relaxed) + change);
  if (use == MemoryCategory::offloaded) return;
  const std::int64_t total = total_.fetch_add(change, std::memory_order_relaxed) + change;
  if (raise(total_peak_, total))
    for (std::size_t i = 0; i < kMemoryUses; ++i)
      at_peak_[i].store(now_[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
  raise(held_peak_, total + slack_.load(std::memory_order_relaxed));
}

void MemoryTracker::remove(MemoryCategory use, std::size_t bytes) noexcept {
  const auto change = static_cast<std::int64_t>(bytes);
  now_[static_cast<std::size_t>(use)].fetch_sub(change, std::memory_order_relaxed);
  note(use, -change);
  if (use == MemoryCategory::offloaded) return;
  total_.fetch_sub(change, std::memory_order_relaxed);
}

void MemoryTracker::hold(std::int64_t change) noexcept {
  const std::int64_t slack = slack_.fetch_add(change, std::memory_order_relaxed) + change;
  raise(held_peak_, total_.load(std::memory_order_relaxed) + slack);
}

MemoryTracker::Snapshot MemoryTracker::snapshot() const noexcept {
  Snapshot s;
  for (std::size_t i = 0; i < kMemoryUses; ++i) {
    s.now[i] = static_cast<std::uint64_t>(now_[i].load(std::memory_order_relaxed));
    s.peak[i] = static_cast<std::uint64_t>(peak_[i].load(std::memory_order_relaxed));
    s.at_peak[i] = static_cast<std::uint64_t>(at_peak_[i].load(std::memory_order_relaxed));
  }
  s.total_now = static_cast<std::uint64_t>(total_.load(std::memory_order_relaxed));
  const std::int64_t total_peak = total_peak_.load(std::memory_order_relaxed);
  s.total_peak = static_cast<std::uint64_t>(total_peak);
  s.reserved =
      static_cast<std::uint64_t>(std::max<std::int64_t>(0, held_peak_.load(std::memory_order_relaxed) - total_peak));
  return s;
}

void MemoryTracker::reset_peaks() noexcept {
  for (std::size_t i = 0; i < kMemoryUses; ++i) {
    const std::int64_t now = now_[i].load(std::memory_order_relaxed);
    peak_[i].store(now, std::memory_order_relaxed);
    at_peak_[i].store(now, std::memory_order_relaxed);
  }
  const std::int64_t total = total_.load(std::memory_order_relaxed);
  total_peak_.store(total, std::memory_order_relaxed);
  held_peak_.store(total + slack_.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace tessera::base
