#include "backends/shm/member_blocks.h"

namespace tessera::comm::shm {

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

}  // namespace tessera::comm::shm
