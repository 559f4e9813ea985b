// The ports of one rank: what an operation needs of them, which of its operations occupies them, and until when.
// Operations begin when the ranks have called them, at times in memory that the ranks share.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::comm {

/// Each rank writes its own times and reads those of all. The memory has no name, so nothing is left behind by a rank
/// that is killed. Ranks on several hosts share none; each then knows its own times only.
class CallTimes {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  /// Collective over `communicator`, which is used in the constructor only.
  explicit CallTimes(Communicator& communicator);
  ~CallTimes();
  CallTimes(const CallTimes&) = delete;
  CallTimes& operator=(const CallTimes&) = delete;

  bool shared() const noexcept { return times_ != nullptr; }  ///< the same on every rank
  /// This rank calls collective number `call`, from 0.
  void record(std::uint64_t call, TimePoint time) noexcept;
  /// When the last of these ranks called it; nothing: one of them has not called yet. Calls that are many calls behind
  /// a rank's last one are not counted.
  std::optional<TimePoint> last(std::uint64_t call, std::span<const int> ranks) const noexcept;

 private:
  struct Header;
  std::atomic<std::uint64_t>& entry(int rank, std::uint64_t call) const noexcept;
  void attach(Communicator& communicator);

  const int rank_;
  void* memory_ = nullptr;
  const std::size_t bytes_;
  std::atomic<std::uint64_t>* times_ = nullptr;
};

/// The median of the latest times, in memory that stays bounded. Not thread-safe.
class LatestTimes {
 public:
  static constexpr std::size_t kMost = 4096;

  void add(double us) {
    us_.push_back(us);
    if (us_.size() > kMost) us_.pop_front();
  }

  /// In microseconds, of the latest kMost; the upper one of two. 0 if there are none.
  double median() const {
    if (us_.empty()) return 0;
    std::vector<double> sorted(us_.begin(), us_.end());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

 private:
  std::deque<double> us_;
};

/// Ports of a rank: to ranks of its host, and to those of other hosts.
inline constexpr std::size_t kPorts = 2;

/// How an operation uses the ports of its rank.
struct PortUse {
  std::array<std::chrono::nanoseconds, kPorts> occupied{};  ///< its bytes at the rate of each
  std::chrono::nanoseconds latency{};                       ///< that follows, while the next operation uses the ports
  std::vector<int> senders;                                 ///< ranks whose data it waits for
};

/// An operation on its way.
struct Transfer {
  PortUse use;
  const CallTimes* times = nullptr;  ///< null: it begins when this rank calls it
  std::uint64_t number = 0;          ///< of the call, in `times`
  CallTimes::TimePoint called;       ///< by this rank
  CallTimes::TimePoint begun = {};   ///< set by Ports when it is known, as is `done`
  std::optional<CallTimes::TimePoint> done = {};
};

/// Every port passes one operation's bytes at a time, first come, first served. An operation comes when this rank and
/// the last of those whose data it waits for have called it, so its time depends on neither the transport below nor on
/// when anybody asks. Thread-safe.
class TESSERA_API Ports {
 public:
  void add(std::shared_ptr<Transfer> transfer);
  void remove(const Transfer& transfer);  ///< it failed, or is over
  /// When it is through; nothing while a rank has not called it.
  std::optional<CallTimes::TimePoint> done_at(const Transfer& transfer);

 private:
  void serve();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Transfer>> waiting_;
  std::array<CallTimes::TimePoint, kPorts> free_{};
};

/// The members of a communicator, of which `rank` is this one.
struct LinkedGroup {
  const SlowLinks& links;
  int world_size = 1;
  std::span<const int> members;  ///< ranks of the world
  int rank = 0;
};

/// Of one operation, or of the parts of a batch, which pass together.
TESSERA_API PortUse port_use(const LinkedGroup& group, std::span<const OpDesc> calls);

}  // namespace tessera::comm
