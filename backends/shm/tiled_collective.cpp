#include "backends/shm/tiled_collective.h"

#include <algorithm>

#include "tessera/comm/kernels/reduce.h"

// How data passes from a rank to its readers, for an all_reduce over four ranks, whose rank j owns slice j:
//
//   input of each rank                 output of rank j                      outputs of all
//   -- staged: rounds that lie there   -- phase_a: rounds of slice j that    -- phase_b: rounds of all slices
//      in a tile or a copy                rank j has reduced from all           that this rank has copied
//
// Each rank writes its three flags and reads those of the others; no rank ever writes for another. A flag is also the
// answer that frees memory: what phase_a says about slice j, every other rank reads twice. As "results are there" it
// lets the rank copy them, and as "inputs are read" it lets the rank reuse the tile that held them. With kTiles tiles a
// writer is at most kTiles rounds ahead of its slowest reader; a window or a copy has room for all rounds.
//
// A flag holds the number of the operation above that of the round, so it only grows. A reader that finds a later
// operation there knows that its peer is done with this one, and nothing is reset between two operations. That is also
// what makes two announcement slots enough: a rank announces operation s once all have announced s - 1, and a rank
// that has announced s - 1 has left s - 2.
//
// An operation ends on a rank when no rank reads its caller's memory any more. Readers of a window or of another
// process's memory say so by phase_b = kAllRounds (the stage `draining`). Where all readers had copies or tiles, the
// rank leaves at once: their slots are reused two operations later, which needs the announcement of all.
namespace tessera::comm::shm {
namespace {

/// Rounds at once if no tile limits them: each stop costs a fence that waits for the memory, or a system call.
constexpr std::uint64_t kAtOnce = 8;

/// The part of `whole` that belongs to `round`.
Slice block_of(const ShmOperation& op, Slice whole, std::uint64_t round) {
  const std::size_t elements = op.round_bytes / size_of(op.call.in.dtype);
  const std::size_t begin = std::min<std::size_t>(whole.count, round * elements);
  return {whole.offset + begin, std::min(elements, whole.count - begin)};
}

/// The part of `whole` that belongs to the rounds from `first` until before `end`.
Slice blocks_of(const ShmOperation& op, Slice whole, std::uint64_t first, std::uint64_t end) {
  const Slice from = block_of(op, whole, first);
  const Slice last = block_of(op, whole, end - 1);
  return {from.offset, last.offset + last.count - from.offset};
}

}  // namespace

TiledCollective::TiledCollective(const MemberBlocks& members, CollectiveBuffers& buffers)
    : members_(members),
      buffers_(buffers),
      rank_(members.rank()),
      size_(members.size()),
      peers_(static_cast<std::size_t>(size_)),
      sources_(static_cast<std::size_t>(size_)),
      factors_(static_cast<std::size_t>(size_)) {}

void TiledCollective::begin(ShmOperation& op) {
  op.any_staged = op.stages_in || op.stages_out;
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const CollectiveSlot& slot = members_.of(k).slot(op.sequence);
    PeerBuffers& from = peer(k);
    from.cma_in = slot.in_offset == kViaCma;
    from.cma_out = slot.out_offset == kViaCma;
    from.copied_in = (slot.hints & kCopiedIn) != 0;
    from.copied_out = (slot.hints & kCopiedOut) != 0;
    from.all_there = (slot.hints & kAllThere) != 0;
    const auto place = [&](std::uint64_t offset, bool copied, const std::byte* const& address) {
      if (offset == kViaTiles) return static_cast<const std::byte*>(nullptr);
      return offset == kViaCma ? address : (copied ? members_.staging(k) : members_.window(k)) + offset;
    };
    from.in = place(slot.in_offset, from.copied_in, slot.cma.in);
    from.out = place(slot.out_offset, from.copied_out, slot.cma.out);
    from.tiles = members_.staging(k) + slot.stage_offset;
    op.any_staged |= from.in == nullptr || from.out == nullptr;
    op.any_awaits |= (slot.hints & kAwaitsReaders) != 0;
  }
}

bool TiledCollective::advance(ShmOperation& op) {
  if (op.stage == ShmOperation::Stage::draining) return await_readers(op);
  if (stage_input(op)) return true;
  if (op.layout.reduces() ? reduce_round(op) : copy_round(op)) return true;
  if (op.layout.second_half() && copy_results(op)) return true;
  if (!is_done(op)) return false;
  if (op.any_awaits) {
    members_.own().head().phase_a.value.store(encode(op.sequence, kAllRounds));
    publish(members_.own().head().phase_b.value, op, kAllRounds);
  }
  op.stage = ShmOperation::Stage::draining;
  op.arrived = 0;
  return true;
}

/// Whether this rank's work is done.
bool TiledCollective::is_done(const ShmOperation& op) const {
  if (op.fills() && op.staged < op.rounds_sent()) return false;
  if (op.layout.reduces()) {
    if (op.reduced < op.rounds_for(op.layout.read_slice(rank_).count)) return false;
  } else {
    for (int k = 0; k < size_; ++k)
      if (op.copied_inputs[static_cast<std::size_t>(k)] < op.rounds_for(op.layout.read_slice(k).count)) return false;
  }
  for (int k = 0; k < size_ && op.layout.second_half(); ++k)
    if (k != rank_ && op.copied_results[static_cast<std::size_t>(k)] < op.rounds_for(op.layout.owned_slice(k).count))
      return false;
  return true;
}

/// Waits until every peer has read its data of this rank, unless that is a copy; the peer's last flag reports it.
bool TiledCollective::await_readers(ShmOperation& op) {
  const int before = op.arrived;
  const bool awaited = op.awaits_readers();
  while (awaited && op.arrived < size_ &&
         (op.arrived == rank_ ||
          rounds_of(members_.of(op.arrived).head().phase_b.value.load(), op.sequence) == kAllRounds))
    ++op.arrived;
  if (awaited && op.arrived < size_) return op.arrived != before;
  op.stage = ShmOperation::Stage::done;
  return true;
}

void TiledCollective::publish(std::atomic<std::uint64_t>& flag, const ShmOperation& op, std::uint64_t rounds) noexcept {
  flag.store(encode(op.sequence, rounds));
  members_.ring_all();
}

/// Rounds of this rank's tiles that all readers are done with.
std::uint64_t TiledCollective::slowest_reader(const ShmOperation& op, bool results) const {
  std::uint64_t slowest = kAllRounds;
  for (int j = 0; j < size_; ++j) {
    if (j == rank_ || (!results && op.layout.sent_slice(j).count == 0)) continue;
    const ControlHeader& head = members_.of(j).head();
    slowest = std::min(slowest, rounds_of((results ? head.phase_b : head.phase_a).value.load(), op.sequence));
  }
  return slowest;
}

/// Copies the next round of this rank's input to its tile, or to its place in the copy.
bool TiledCollective::stage_input(ShmOperation& op) {
  if (!op.fills()) return false;
  const std::uint64_t rounds = op.rounds_sent();
  if (op.staged >= rounds || (op.stages_in && op.staged >= slowest_reader(op, false) + kTiles)) return false;
  const std::size_t size = size_of(op.call.in.dtype);
  const auto* in = static_cast<const std::byte*>(op.call.in.data);
  for (int j = 0; j < size_; ++j) {
    if (j == rank_) continue;
    const Slice block = block_of(op, op.layout.sent_slice(j), op.staged);
    if (block.count == 0) continue;
    std::byte* to = op.copied_in ? buffers_.copy(op, block.offset * size)
                                 : buffers_.own_tile(op, op.staged, op.layout.shares_input() ? 0 : j, false);
    copy_for_readers(op, to, in + block.offset * size, block.count * size, op.stages_in);
    if (op.layout.shares_input()) break;
  }
  ++op.staged;
  publish(members_.own().head().staged.value, op, op.staged == rounds ? kAllRounds : op.staged);
  return true;
}

/// Rounds of the data of `source` that can be read.
std::uint64_t TiledCollective::rounds_there(const ShmOperation& op, int source) const {
  return peer(source).all_there ? kAllRounds : rounds_of(members_.of(source).head().staged.value.load(), op.sequence);
}

/// Address of the block of `round` in the data that `source` sends to this rank.
const std::byte* TiledCollective::source_block(const ShmOperation& op, int source, Slice whole,
                                               std::uint64_t round) const {
  const std::size_t size = size_of(op.call.in.dtype);
  const Slice block = block_of(op, whole, round);
  if (source == rank_) {
    const std::size_t mine =
        op.layout.ragged() && op.call.kind == OpKind::all_to_all ? op.layout.sent_slice(rank_).offset : 0;
    return static_cast<const std::byte*>(op.call.in.data) + (mine + block.offset) * size;
  }
  const PeerBuffers& from = peer(source);
  if (from.in == nullptr)
    return from.tiles + buffers_.tile_offset(op, round, op.layout.shares_input() ? 0 : rank_, false);
  std::size_t begins = 0;
  if (op.layout.ragged() && op.call.kind == OpKind::all_to_all)
    begins = members_.of(source).part_offsets(rank_)[op.sequence % 2];
  return from.in + (begins + block.offset) * size;
}

bool TiledCollective::reduce_round(ShmOperation& op) {
  const Slice whole = op.layout.read_slice(rank_);
  const std::uint64_t rounds = op.rounds_for(whole.count);
  const std::uint64_t round = op.reduced;
  if (round >= rounds) return false;
  std::uint64_t end = std::min(rounds, round + (op.any_staged ? 1 : kAtOnce));
  for (int k = 0; k < size_; ++k)
    if (k != rank_) end = std::min(end, rounds_there(op, k));
  if (end <= round) return false;
  if (op.stages_out && round >= slowest_reader(op, true) + kTiles) return false;

  const std::size_t size = size_of(op.call.in.dtype);
  const Slice block = blocks_of(op, whole, round, end);
  for (int k = 0; k < size_; ++k) sources_[static_cast<std::size_t>(k)] = source_block(op, k, whole, round);
  for (int k = 0; k < size_; ++k)
    if (!peer(k).copied_in) members_.count_read(op, k, block.count * size);
  // Results go to the offset of the slice for all_reduce, to the start for the other two.
  std::byte* out =
      static_cast<std::byte*>(op.call.out.data) + (op.layout.output_offset(rank_) + block.offset - whole.offset) * size;
  members_.read_factors(op, factors_);
  const auto reduce = [&](bool streams) {
    reduce_tree(op.call.op, op.call.in.dtype, sources_, factors_, out, block.count, streams);
  };
  if (op.layout.second_half() && !op.copied_out && !op.stages_out && !op.streaming)
    buffers_.stores().write(StoreChoice::Target::reduced_result, op.call.in.bytes(), block.count * size, reduce);
  else
    reduce(op.streaming);
  if (op.stages_out) copy_for_readers(op, buffers_.own_tile(op, round, 0, true), out, block.count * size, true);
  if (op.copied_out)  // where no rank reads inputs
    copy_for_readers(op, buffers_.copy(op, block.offset * size), out, block.count * size, false);
  op.reduced = end;
  if (op.any_staged || end % kAtOnce == 0 || end == rounds)
    publish(members_.own().head().phase_a.value, op, end == rounds ? kAllRounds : end);
  return true;
}

/// Copies to memory that other ranks will read, and have read in an operation before.
void TiledCollective::copy_for_readers(const ShmOperation& op, std::byte* to, const std::byte* from, std::size_t bytes,
                                       bool tile) {
  buffers_.stores().write(tile ? StoreChoice::Target::tile : StoreChoice::Target::copy, op.call.in.bytes(), bytes,
                          [&](bool streams) { copy_bytes(to, from, bytes, streams); });
}

/// Copies this rank's data to itself, without waiting for peers.
bool TiledCollective::copy_own(ShmOperation& op) {
  if (op.layout.reduces()) return false;
  std::uint64_t& taken = op.copied_inputs[static_cast<std::size_t>(rank_)];
  const Slice whole = op.layout.read_slice(rank_);
  const std::uint64_t rounds = op.rounds_for(whole.count);
  if (taken >= rounds) return false;
  const std::uint64_t end = std::min(rounds, taken + kAtOnce);
  const Slice block = blocks_of(op, whole, taken, end);
  const std::size_t size = size_of(op.call.in.dtype);
  copy_bytes(
      static_cast<std::byte*>(op.call.out.data) + (op.layout.output_offset(rank_) + block.offset - whole.offset) * size,
      source_block(op, rank_, whole, taken), block.count * size, op.streaming);
  taken = end;
  return true;
}

bool TiledCollective::copy_round(ShmOperation& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn < size_; ++turn) {
    const int k = (rank_ + turn) % size_;  // each rank begins with a different source
    std::uint64_t& taken = op.copied_inputs[static_cast<std::size_t>(k)];
    const Slice whole = op.layout.read_slice(k);
    if (taken >= op.rounds_for(whole.count)) continue;
    const std::uint64_t there = rounds_there(op, k);
    if (there <= taken) continue;
    const bool cma = peer(k).cma_in;
    const bool staged = peer(k).in == nullptr;
    const std::uint64_t end = std::min({op.rounds_for(whole.count), there, taken + (staged ? 1 : kAtOnce)});
    const Slice block = blocks_of(op, whole, taken, end);
    std::byte* out =
        static_cast<std::byte*>(op.call.out.data) + (op.layout.output_offset(k) + block.offset - whole.offset) * size;
    const std::byte* from = source_block(op, k, whole, taken);
    if (!cma) {
      copy_bytes(out, from, block.count * size, op.streaming);
    } else if (!members_.read(k, from, out, block.count * size)) {
      continue;  // the peer died: the thread that watches the ranks reports it
    }
    if (!peer(k).copied_in) members_.count_read(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.copied_inputs[static_cast<std::size_t>(j)];
      if (j != rank_ && done < op.rounds_for(op.layout.read_slice(j).count)) slowest = std::min(slowest, done);
    }
    if (op.any_staged) publish(members_.own().head().phase_a.value, op, slowest);
    return true;
  }
  return copy_own(op);
}

/// Whether the results of other ranks go where these have read this rank's input.
bool TiledCollective::overwrites_input(const ShmOperation& op) {
  return op.call.in.data == op.call.out.data && !op.copied_in && !op.stages_in;
}

bool TiledCollective::copy_results(ShmOperation& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn < size_; ++turn) {
    const int k = (rank_ + turn) % size_;
    std::uint64_t& taken = op.copied_results[static_cast<std::size_t>(k)];
    const Slice whole = op.layout.owned_slice(k);
    if (taken >= op.rounds_for(whole.count)) continue;
    if (rounds_of(members_.of(k).head().phase_a.value.load(), op.sequence) <= taken) continue;
    const PeerBuffers& owner = peer(k);
    const std::uint64_t there =
        std::min(op.rounds_for(whole.count), rounds_of(members_.of(k).head().phase_a.value.load(), op.sequence));
    const std::uint64_t end = std::min(there, taken + (owner.out == nullptr ? 1 : kAtOnce));
    const Slice block = blocks_of(op, whole, taken, end);
    std::byte* out = static_cast<std::byte*>(op.call.out.data) + block.offset * size;
    const std::byte* from =
        owner.out == nullptr ? owner.tiles + buffers_.tile_offset(op, taken, 0, true) : owner.out + block.offset * size;
    const auto copy = [&](bool streams) { copy_bytes(out, from, block.count * size, streams); };
    if (!owner.cma_out && overwrites_input(op) && !op.streaming) {
      buffers_.stores().write(StoreChoice::Target::copied_result, op.call.in.bytes(), block.count * size, copy);
    } else if (!owner.cma_out) {
      copy(op.streaming);
    } else if (!members_.read(k, from, out, block.count * size)) {
      continue;
    }
    if (!owner.copied_out) members_.count_read(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.copied_results[static_cast<std::size_t>(j)];
      if (j != rank_ && done < op.rounds_for(op.layout.owned_slice(j).count)) slowest = std::min(slowest, done);
    }
    // advance() publishes that all is read.
    if (op.any_staged && slowest != kAllRounds) publish(members_.own().head().phase_b.value, op, slowest);
    return true;
  }
  return false;
}

}  // namespace tessera::comm::shm
