#include "backends/shm/collective_buffers.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::shm {
namespace {

/// Requests to own a cache line. Processors that lack the instruction ignore it.
void prefetch_for_write(const std::byte& line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(line));
#else
  __builtin_prefetch(&line, 1);
#endif
}

}  // namespace

void Announcements::prefetch(const ShmOperation& op) const {
  constexpr std::size_t kCacheLine = 64;
  constexpr std::size_t kMax = 4096;  // more would wait for each other
  const std::byte* payload = members_.own().slot(op.sequence).payload;
  const std::size_t bytes = std::min(op.call.in.bytes(), kMax);
  for (std::size_t at = 0; at < bytes; at += kCacheLine) prefetch_for_write(payload[at]);
}

bool Announcements::has_room(const ShmOperation& op) {
  if (all_announced_ + 1 >= op.sequence) return true;
  for (int k = 0; k < members_.size(); ++k)
    if (k != members_.rank() && last(k) + 1 < op.sequence) return false;
  all_announced_ = op.sequence - 1;
  return true;
}

void Announcements::publish(ShmOperation& op) {
  const OpDesc& call = op.call;
  CollectiveSlot& slot = members_.own().slot(op.sequence);
  std::uint64_t in_offset = 0;
  std::uint64_t out_offset = 0;
  if (op.eager) {
    op.copy_sent(slot.payload, buffers_.stores());
  } else {
    buffers_.choose(op);
    in_offset = buffers_.input_offset(op);
    out_offset = buffers_.result_offset(op);
    publish_buffers(op, slot);
  }
  const auto hints = static_cast<std::uint8_t>((op.copied_in ? kCopiedIn : 0) | (op.copied_out ? kCopiedOut : 0) |
                                               (op.awaits_readers() ? kAwaitsReaders : 0) |
                                               (!op.fills() || op.staged > 0 ? kAllThere : 0));
  const std::uint64_t count = op.layout.table_count();
  // Written after the payload and at once: peers poll the cache line that these fields share with the sequence number.
  slot.in_offset = in_offset;
  slot.out_offset = out_offset;
  slot.hints = hints;
  slot.fingerprint = op.fingerprint;
  slot.count = count;
  slot.kind = call.kind;
  slot.dtype = call.in.dtype;
  slot.reduce = call.op.kind;
  slot.root = call.root;
  slot.factor = call.op.scalar;
  slot.sequence.store(op.sequence);
  op.stage = ShmOperation::Stage::announced;
  members_.ring_all();
}

void Announcements::publish_buffers(ShmOperation& op, CollectiveSlot& slot) {
  const OpDesc& call = op.call;
  const auto ranks = static_cast<std::size_t>(members_.size());
  slot.cma = {static_cast<const std::byte*>(call.in.data), static_cast<const std::byte*>(call.out.data)};
  slot.stage_offset = buffers_.tiles_offset();
  if (call.kind == OpKind::all_to_all && op.layout.ragged())
    for (int j = 0; j < members_.size(); ++j)
      members_.own().part_offsets(j)[op.sequence % 2] = op.layout.sent_slice(j).offset;
  op.copied_inputs.assign(ranks, 0);
  op.copied_results.assign(ranks, 0);
  if (op.copied_in && op.rounds_sent() == 1) {  // else later, in rounds, so that peers can start with the first
    op.copy_sent(buffers_.copy(op), buffers_.stores());
    op.staged = 1;
  }
}

bool Announcements::read(ShmOperation& op) {
  const int before = op.arrived;
  while (op.arrived < members_.size() && (op.arrived == members_.rank() || !op.awaits(op.arrived) ||
                                          members_.of(op.arrived).slot(op.sequence).sequence.load() >= op.sequence))
    ++op.arrived;
  if (op.arrived < members_.size()) return op.arrived != before;
  if (!matches(op)) {
    if (op.everyone) throw Mismatch(mismatch(op));
    op.everyone = true;  // waits for all ranks, to report what each calls
    op.arrived = 0;
    return true;
  }
  if (op.everyone) all_announced_ = op.sequence;
  op.stage = ShmOperation::Stage::running;
  return true;
}

std::uint64_t Announcements::last(int member) const {
  const ControlBlock& block = members_.of(member);
  return std::max(block.slot(0).sequence.load(), block.slot(1).sequence.load());
}

/// Whether the ranks that have arrived call the same operation.
bool Announcements::matches(const ShmOperation& op) const {
  bool same = true;
  for (int k = 0; k < members_.size(); ++k)
    if (op.awaits(k)) same &= members_.of(k).slot(op.sequence).fingerprint == op.fingerprint;
  return same;
}

std::string Announcements::mismatch(const ShmOperation& op) const {
  return CallVerifier::format_mismatch(op.sequence, members_.size(), [&](int k) {
    const CollectiveSlot& slot = members_.of(k).slot(op.sequence);
    std::string row =
        op.group->rank_name(k) + ": " + signature(slot.kind, slot.count, slot.dtype, slot.reduce, slot.root);
    if (slot.kind == OpKind::barrier) return row;
    // A slot has no room for the labels of other ranks, which checked mode compares.
    if (k == members_.rank() && !op.call.label.empty()) row += " (" + std::string(op.call.label) + ")";
    return row;
  });
}

}  // namespace tessera::comm::shm
