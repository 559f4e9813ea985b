#include "backends/shm/member_blocks.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace tessera::comm::shm {
namespace {

using namespace std::chrono_literals;
constexpr auto kReplyTime = 250ms;  ///< a live rank answers a ping within microseconds

}  // namespace

MemberBlocks::MemberBlocks(ShmRuntime& runtime, int rank, std::vector<int> world_ranks,
                           std::shared_ptr<MemoryTracker> tracker, TrafficCounters& sent)
    : runtime_(runtime),
      rank_(rank),
      size_(static_cast<int>(world_ranks.size())),
      world_ranks_(std::move(world_ranks)),
      memory_tracker_(std::move(tracker)),
      sent_(sent) {
  const auto zeroed = [&](std::size_t bytes) {
    return runtime_.staging().allocate(bytes, MemoryCategory::communication, memory_tracker_, true);
  };
  head_ = zeroed(ControlBlock::head_bytes(size_));
  slots_ = zeroed(sizeof(PortSlots));
}

MemberBlocks::Offsets MemberBlocks::own_offsets() const {
  return {runtime_.staging().offset_of(head_.data()), runtime_.staging().offset_of(slots_.data())};
}

void MemberBlocks::connect(std::span<const Offsets> offsets) {
  for (int k = 0; k < size_; ++k) {
    std::byte* memory = runtime_.staging(world_rank(k));
    const auto& [head, slots] = offsets[static_cast<std::size_t>(k)];
    blocks_.emplace_back(memory + head, memory + slots, size_);
  }
}

ShmRuntime::RetiredBlock MemberBlocks::retire() {
  ShmRuntime::RetiredBlock retired;
  for (const ControlBlock& block : blocks_) block.head().done.value.fetch_add(1);
  retired.members = world_ranks_.size();
  retired.head = std::move(head_);
  retired.slots = std::move(slots_);
  return retired;
}

void MemberBlocks::ring_all() const noexcept {
  for (int k = 0; k < size_; ++k)
    if (k != rank_) ring(k);
}

void MemberBlocks::read_factors(const Operation& op, std::span<double> factors) const {
  if (op.call.op.kind != ReduceOp::Kind::premul_sum) return;
  for (int k = 0; k < size_; ++k)
    factors[static_cast<std::size_t>(k)] = k == rank_ ? op.call.op.scalar : of(k).slot(op.sequence).factor;
}

Buffer MemberBlocks::allocate(std::size_t bytes) const {
  return runtime_.staging().allocate(bytes, MemoryCategory::communication, memory_tracker_);
}

void MemberBlocks::read_traffic(TrafficStats& stats) const {
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const ByteCounts& read = of(k).credit(rank_);
    for (std::size_t i = 0; i < kOpKinds; ++i) {
      const std::uint64_t bytes = read.bytes[i].load(std::memory_order_relaxed);
      stats.by_kind[i].bytes_sent += bytes;
      stats.bytes_to_peer[static_cast<std::size_t>(k)] += bytes;
    }
  }
}

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
