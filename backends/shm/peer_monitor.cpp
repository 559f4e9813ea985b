#include "backends/shm/peer_monitor.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
constexpr auto kReplyTime = 250ms;  ///< a live rank answers a ping within microseconds

}  // namespace

std::optional<Failure> SharedPeerMonitor::published_failure() const {
  for (int k = 0; k < members_.size(); ++k) {
    const FailureRecord& record = members_.of(k).head().failure;
    if (k != members_.rank() && record.state.load() != 0) return Failure{record.kind, record.text.data()};
  }
  return std::nullopt;
}

void SharedPeerMonitor::publish(const Failure& failure) const noexcept {
  FailureRecord& record = members_.own().head().failure;
  record.kind = failure.kind;
  const std::size_t length = std::min(failure.cause.size(), record.text.size() - 1);
  std::memcpy(record.text.data(), failure.cause.data(), length);
  record.text[length] = '\0';
  record.state.store(1);
  members_.ring_all();
}

std::string SharedPeerMonitor::death(int member) const {
  const RankRecord& record = members_.record(member);
  return record.lost.load() == 0 ? "" : "died (process " + std::to_string(record.pid.load()) + ")";
}

std::vector<bool> SharedPeerMonitor::ping_all() const {
  const int ranks = members_.size();
  std::vector<std::uint32_t> pings(static_cast<std::size_t>(ranks));
  for (int k = 0; k < ranks; ++k)
    if (k != members_.rank()) pings[static_cast<std::size_t>(k)] = send_ping(members_.record(k).bell);
  std::vector<bool> responds(static_cast<std::size_t>(ranks));
  const Clock::time_point until = Clock::now() + kReplyTime;
  for (bool all = false; !all && Clock::now() < until;) {
    members_.runtime().engine().reply_to_pings();  // the others may be asking at the same moment
    std::this_thread::sleep_for(1ms);
    all = true;
    for (int k = 0; k < ranks; ++k) {
      const auto i = static_cast<std::size_t>(k);
      const auto ahead = static_cast<std::int32_t>(members_.record(k).bell.pong.load() - pings[i]);
      responds[i] = k == members_.rank() || ahead >= 0;
      all = all && responds[i];
    }
  }
  return responds;
}

}  // namespace tessera::comm::shm
