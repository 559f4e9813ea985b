// The tiled algorithm of the collectives.
//
// Every operation is divided into rounds. A rank's data is either in a window, where all rounds are available from the
// start, or it goes through a few tiles that are used in turn. Readers follow the flags of each source independently,
// so windows and other memory may be mixed freely over the ranks. all_reduce: rank j computes slice j (first half),
// then every rank reads all slices (second half).
#include <algorithm>
#include <cstring>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::shm {
namespace {

constexpr std::uint64_t kTiles = 4;
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

bool ShmGroup::advance_collective(ShmOperation& op) {
  if (op.stage == ShmOperation::Stage::queued) {
    if (!has_room(op)) return false;
    announce(op);
    return true;
  }
  bool moved = false;
  if (op.stage == ShmOperation::Stage::announced) {
    moved = see_arrivals(op);
    if (op.stage == ShmOperation::Stage::announced) return stage_input(op) || copy_own(op) || moved;
  }
  if (op.eager) {
    run_eager(op);
    collectives_.pop();
    complete(op, ShmOperation::kGood);
    return true;
  }
  if (op.stage == ShmOperation::Stage::running) return run_tiles(op) || moved;
  return finish_collective(op) || moved;
}

std::size_t ShmGroup::tile_bytes() const { return size_ <= 8 ? 64 * 1024 : 16 * 1024; }
std::size_t ShmGroup::tiles_bytes() const { return kTiles * tile_bytes() * static_cast<std::size_t>(size_ + 1); }

bool ShmGroup::see_arrivals(ShmOperation& op) {
  const int before = op.arrived;
  while (op.arrived < size_ && (op.arrived == rank_ || !op.awaits(op.arrived) ||
                                port(op.arrived).slot(op.sequence).sequence.load() >= op.sequence))
    ++op.arrived;
  if (op.arrived < size_) return op.arrived != before;
  if (!fits_others(op)) {
    if (op.everyone) throw Mismatch(table_of(op));
    op.everyone = true;  // waits for all ranks, to report what each calls
    op.arrived = 0;
    return true;
  }
  if (op.everyone) room_seen_ = op.sequence;
  op.stage = ShmOperation::Stage::running;
  if (op.eager) return true;
  op.any_staged = op.stages_in || op.stages_out;
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const CollectiveSlot& slot = port(k).slot(op.sequence);
    PeerBuffers& peer = peers_[static_cast<std::size_t>(k)];
    peer.remote_in = slot.in_offset == kRemote;
    peer.remote_out = slot.out_offset == kRemote;
    peer.copied_in = (slot.hints & kCopiedIn) != 0;
    peer.copied_out = (slot.hints & kCopiedOut) != 0;
    peer.all_there = (slot.hints & kAllThere) != 0;
    const auto place = [&](std::uint64_t offset, bool copied, const std::byte* const& address) {
      if (offset == kStaged) return static_cast<const std::byte*>(nullptr);
      return offset == kRemote ? address : (copied ? staging_of(k) : window_of(k)) + offset;
    };
    peer.in = place(slot.in_offset, peer.copied_in, slot.remote.in);
    peer.out = place(slot.out_offset, peer.copied_out, slot.remote.out);
    peer.tiles = staging_of(k) + slot.stage_offset;
    op.any_staged |= peer.in == nullptr || peer.out == nullptr;
    op.any_awaits |= (slot.hints & kAwaitsReaders) != 0;
  }
  return true;
}

/// Runs one bounded piece of whatever work is possible.
bool ShmGroup::run_tiles(ShmOperation& op) {
  if (stage_input(op)) return true;
  if (op.reduces() ? reduce_round(op) : copy_round(op)) return true;
  if (op.second_half() && copy_results(op)) return true;
  // Whether this rank's work is done.
  if (op.fills() && op.staged < op.rounds_given()) return false;
  if (op.reduces()) {
    if (op.reduced < op.rounds_for(op.read_slice(rank_).count)) return false;
  } else {
    for (int k = 0; k < size_; ++k)
      if (op.taken_a[static_cast<std::size_t>(k)] < op.rounds_for(op.read_slice(k).count)) return false;
  }
  if (op.second_half())
    for (int k = 0; k < size_; ++k)
      if (k != rank_ && op.taken_b[static_cast<std::size_t>(k)] < op.rounds_for(op.owned_slice(k).count)) return false;
  if (op.any_awaits) {
    own().head().phase_a.value.store(encode(op.sequence, kAllRounds));
    publish(own().head().phase_b.value, op, kAllRounds);
  }
  op.stage = ShmOperation::Stage::draining;
  op.arrived = 0;
  return true;
}

/// Completes once every peer has read its data of this rank, unless that is a copy; the peer's last flag reports it.
bool ShmGroup::finish_collective(ShmOperation& op) {
  const int before = op.arrived;
  const bool awaited = op.awaits_readers();
  while (awaited && op.arrived < size_ &&
         (op.arrived == rank_ || rounds_of(port(op.arrived).head().phase_b.value.load(), op.sequence) == kAllRounds))
    ++op.arrived;
  if (awaited && op.arrived < size_) return op.arrived != before;
  // A peer that failed may have returned its buffer to its caller, which may have written into what this rank read.
  if (adopt_peer_failure()) return true;
  collectives_.pop();
  complete(op, ShmOperation::kGood);
  return true;
}

void ShmGroup::publish(std::atomic<std::uint64_t>& flag, const ShmOperation& op, std::uint64_t rounds) noexcept {
  flag.store(encode(op.sequence, rounds));
  notify();
}

/// Rounds of this rank's tiles that all readers are done with.
std::uint64_t ShmGroup::slowest_reader(const ShmOperation& op, bool results) const {
  std::uint64_t slowest = kAllRounds;
  for (int j = 0; j < size_; ++j) {
    if (j == rank_ || (!results && op.sent_slice(j).count == 0)) continue;
    const ControlHeader& head = ports_[static_cast<std::size_t>(j)].head();
    slowest = std::min(slowest, rounds_of((results ? head.phase_b : head.phase_a).value.load(), op.sequence));
  }
  return slowest;
}

/// Layout of the tiles: kTiles for the inputs, each with a part for every reader; then kTiles for the results.
std::size_t ShmGroup::tile_offset(const ShmOperation& op, std::uint64_t round, int reader, bool result) const {
  const auto n = static_cast<std::uint64_t>(size_);
  const std::uint64_t turn = round % kTiles;
  return op.round_bytes * (result ? kTiles * n + turn : turn * n + static_cast<std::uint64_t>(reader));
}

std::byte* ShmGroup::own_tile(const ShmOperation& op, std::uint64_t round, int reader, bool result) {
  return tiles_.bytes_at(tile_offset(op, round, reader, result));
}

/// Copies the next round of this rank's input to its tile, or to its place in the copy.
bool ShmGroup::stage_input(ShmOperation& op) {
  if (!op.fills()) return false;
  const std::uint64_t rounds = op.rounds_given();
  if (op.staged >= rounds || (op.stages_in && op.staged >= slowest_reader(op, false) + kTiles)) return false;
  const std::size_t size = size_of(op.call.in.dtype);
  const auto* in = static_cast<const std::byte*>(op.call.in.data);
  for (int j = 0; j < size_; ++j) {
    if (j == rank_) continue;
    const Slice block = block_of(op, op.sent_slice(j), op.staged);
    if (block.count == 0) continue;
    std::byte* to = op.copied_in ? copies_[op.sequence % 2].bytes_at(block.offset * size)
                                 : own_tile(op, op.staged, op.shares_input() ? 0 : j, false);
    copy_bytes(to, in + block.offset * size, block.count * size, false);
    if (op.shares_input()) break;
  }
  ++op.staged;
  publish(own().head().staged.value, op, op.staged == rounds ? kAllRounds : op.staged);
  return true;
}

/// Rounds of the data of `source` that can be read.
std::uint64_t ShmGroup::rounds_there(const ShmOperation& op, int source) const {
  const auto k = static_cast<std::size_t>(source);
  return peers_[k].all_there ? kAllRounds : rounds_of(ports_[k].head().staged.value.load(), op.sequence);
}

/// Address of the block of `round` in the data that `source` sends to this rank.
const std::byte* ShmGroup::source_block(const ShmOperation& op, int source, Slice whole, std::uint64_t round) const {
  const std::size_t size = size_of(op.call.in.dtype);
  const Slice block = block_of(op, whole, round);
  if (source == rank_) {
    const std::size_t mine = op.ragged() && op.call.kind == OpKind::all_to_all ? op.sent_slice(rank_).offset : 0;
    return static_cast<const std::byte*>(op.call.in.data) + (mine + block.offset) * size;
  }
  const PeerBuffers& peer = peers_[static_cast<std::size_t>(source)];
  if (peer.in == nullptr) return peer.tiles + tile_offset(op, round, op.shares_input() ? 0 : rank_, false);
  std::size_t begins = 0;
  if (op.ragged() && op.call.kind == OpKind::all_to_all)
    begins = ports_[static_cast<std::size_t>(source)].part_offsets(rank_)[op.sequence % 2];
  return peer.in + (begins + block.offset) * size;
}

bool ShmGroup::reduce_round(ShmOperation& op) {
  const Slice whole = op.read_slice(rank_);
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
    if (!peers_[static_cast<std::size_t>(k)].copied_in) credit(op, k, block.count * size);
  // Results go to the offset of the slice for all_reduce, to the start for the other two.
  std::byte* out =
      static_cast<std::byte*>(op.call.out.data) + (op.output_offset(rank_) + block.offset - whole.offset) * size;
  combine(op, sources_, out, block.count);
  if (op.stages_out) copy_bytes(own_tile(op, round, 0, true), out, block.count * size, false);
  if (op.copied_out)  // where no rank reads inputs
    copy_bytes(copies_[op.sequence % 2].bytes_at(block.offset * size), out, block.count * size, false);
  op.reduced = end;
  if (op.any_staged || end % kAtOnce == 0 || end == rounds)
    publish(own().head().phase_a.value, op, end == rounds ? kAllRounds : end);
  return true;
}

/// Copies this rank's data to itself, without waiting for peers.
bool ShmGroup::copy_own(ShmOperation& op) {
  if (op.eager || op.reduces()) return false;
  std::uint64_t& taken = op.taken_a[static_cast<std::size_t>(rank_)];
  const Slice whole = op.read_slice(rank_);
  const std::uint64_t rounds = op.rounds_for(whole.count);
  if (taken >= rounds) return false;
  const std::uint64_t end = std::min(rounds, taken + kAtOnce);
  const Slice block = blocks_of(op, whole, taken, end);
  const std::size_t size = size_of(op.call.in.dtype);
  copy_bytes(static_cast<std::byte*>(op.call.out.data) + (op.output_offset(rank_) + block.offset - whole.offset) * size,
             source_block(op, rank_, whole, taken), block.count * size, op.streaming);
  taken = end;
  return true;
}

bool ShmGroup::copy_round(ShmOperation& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn < size_; ++turn) {
    const int k = (rank_ + turn) % size_;  // each rank begins with a different source
    std::uint64_t& taken = op.taken_a[static_cast<std::size_t>(k)];
    const Slice whole = op.read_slice(k);
    if (taken >= op.rounds_for(whole.count)) continue;
    const std::uint64_t there = rounds_there(op, k);
    if (there <= taken) continue;
    const bool remote = peers_[static_cast<std::size_t>(k)].remote_in;
    const bool staged = peers_[static_cast<std::size_t>(k)].in == nullptr;
    const std::uint64_t end = std::min({op.rounds_for(whole.count), there, taken + (staged ? 1 : kAtOnce)});
    const Slice block = blocks_of(op, whole, taken, end);
    std::byte* out =
        static_cast<std::byte*>(op.call.out.data) + (op.output_offset(k) + block.offset - whole.offset) * size;
    const std::byte* from = source_block(op, k, whole, taken);
    if (!remote) {
      copy_bytes(out, from, block.count * size, op.streaming);
    } else if (!read_remote(board(k).pid.load(), from, out, block.count * size)) {
      continue;  // the peer died: the thread that watches the ranks reports it
    }
    if (!peers_[static_cast<std::size_t>(k)].copied_in) credit(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.taken_a[static_cast<std::size_t>(j)];
      if (j != rank_ && done < op.rounds_for(op.read_slice(j).count)) slowest = std::min(slowest, done);
    }
    if (op.any_staged) publish(own().head().phase_a.value, op, slowest);
    return true;
  }
  return copy_own(op);
}

bool ShmGroup::copy_results(ShmOperation& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn < size_; ++turn) {
    const int k = (rank_ + turn) % size_;
    std::uint64_t& taken = op.taken_b[static_cast<std::size_t>(k)];
    const Slice whole = op.owned_slice(k);
    if (taken >= op.rounds_for(whole.count)) continue;
    if (rounds_of(port(k).head().phase_a.value.load(), op.sequence) <= taken) continue;
    const PeerBuffers& peer = peers_[static_cast<std::size_t>(k)];
    const std::uint64_t there =
        std::min(op.rounds_for(whole.count), rounds_of(port(k).head().phase_a.value.load(), op.sequence));
    const std::uint64_t end = std::min(there, taken + (peer.out == nullptr ? 1 : kAtOnce));
    const Slice block = blocks_of(op, whole, taken, end);
    std::byte* out = static_cast<std::byte*>(op.call.out.data) + block.offset * size;
    const std::byte* from =
        peer.out == nullptr ? peer.tiles + tile_offset(op, taken, 0, true) : peer.out + block.offset * size;
    if (!peer.remote_out) {
      copy_bytes(out, from, block.count * size, op.streaming);
    } else if (!read_remote(board(k).pid.load(), from, out, block.count * size)) {
      continue;
    }
    if (!peer.copied_out) credit(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.taken_b[static_cast<std::size_t>(j)];
      if (j != rank_ && done < op.rounds_for(op.owned_slice(j).count)) slowest = std::min(slowest, done);
    }
    // run_tiles() publishes that all is read.
    if (op.any_staged && slowest != kAllRounds) publish(own().head().phase_b.value, op, slowest);
    return true;
  }
  return false;
}

}  // namespace tessera::comm::shm
