// The tiled way of the collectives.
//
// Every operation is cut into rounds. What a rank gives away is either in a window, and then all rounds of it are there
// from the start, or goes through a few tiles that take turns. Readers follow the flags of each source; nobody waits
// for anybody else, so windows and other memory may be mixed freely over the ranks. all_reduce: rank j computes slice j
// (first half), then everyone reads everyone's slice (second half).
#include <algorithm>
#include <cstring>

#include "backends/shm/group.h"
#include "tessera/base/error.h"
#include "tessera/comm/reduce.h"
#include "tessera/comm/remote.h"

namespace tessera::shm {
namespace {

constexpr std::uint64_t kTiles = 4;
/// Rounds at once where no tile is in the way: each stop costs a fence that waits for the memory, or a call into the
/// kernel.
constexpr std::uint64_t kAtOnce = 8;

std::uint64_t tile_bytes(int ranks) { return ranks <= 8 ? 64 * 1024 : 16 * 1024; }

std::uint64_t rounds_for(const Op& op, std::size_t count) {
  const std::uint64_t elements = op.round_bytes / size_of(op.call.in.dtype);
  return (count + elements - 1) / elements;
}

/// The part of `whole` that belongs to `round`.
Slice block_of(const Op& op, Slice whole, std::uint64_t round) {
  const std::size_t elements = op.round_bytes / size_of(op.call.in.dtype);
  const std::size_t begin = std::min<std::size_t>(whole.count, round * elements);
  return {whole.offset + begin, std::min(elements, whole.count - begin)};
}

/// ... that belongs to the rounds from `first` until before `end`.
Slice blocks_of(const Op& op, Slice whole, std::uint64_t first, std::uint64_t end) {
  const Slice from = block_of(op, whole, first);
  const Slice last = block_of(op, whole, end - 1);
  return {from.offset, last.offset + last.count - from.offset};
}

/// Rounds until every reader has what it gets from me.
std::uint64_t rounds_given(const Op& op) {
  std::size_t most = 0;
  for (int j = 0; j < op.ranks; ++j)
    if (j != op.me) most = std::max(most, op.gives(j).count);
  return rounds_for(op, most);
}

}  // namespace

bool Group::advance_collective(Op& op) {
  if (op.stage == Op::Stage::queued) {
    announce(op);
    return true;
  }
  bool moved = false;
  if (op.stage == Op::Stage::announced) {
    moved = see_arrivals(op);
    if (op.stage == Op::Stage::announced) return op.stages_in ? stage_input(op) || moved : moved;
  }
  if (op.eager) {
    run_eager(op);
    collectives_.pop();
    complete(op, Op::kGood);
    return true;
  }
  if (op.stage == Op::Stage::running) return run_tiles(op) || moved;
  return finish_collective(op) || moved;
}

void Group::announce(Op& op) {
  const Call& call = op.call;
  Slot& slot = own().slot(op.sequence);
  slot.fingerprint = op.fingerprint;
  slot.count = op.table_count();
  slot.kind = call.kind;
  slot.dtype = call.in.dtype;
  slot.reduce = call.op.kind;
  slot.root = call.root;
  slot.factor = call.op.scalar;
  if (op.eager) {
    if (call.in.bytes() > 0) std::memcpy(slot.payload, call.in.data, call.in.bytes());
  } else {
    Arena& arena = host_->arena();
    op.round_bytes = tile_bytes(size_);
    const bool gives = rounds_given(op) > 0;
    const bool ordinary = gives && !arena.mapping()->holds(call.in.data, call.in.bytes());
    const bool ordinary_out = op.second_half() && !arena.mapping()->holds(call.out.data, call.out.bytes());
    op.remote_in = ordinary && host_->reads_remote();
    op.remote_out = ordinary_out && host_->reads_remote();
    op.stages_in = ordinary && !op.remote_in;
    op.stages_out = ordinary_out && !op.remote_out;
    op.streaming = (call.in.bytes() + call.out.bytes()) * static_cast<std::size_t>(size_) > host_->cache_bytes();
    if ((op.stages_in || op.stages_out) && !tiles_)
      tiles_ = arena.allocate(tiles_bytes(), MemoryUse::communication, ledger_);
    slot.in_offset = op.stages_in ? kStaged : op.remote_in ? kRemote : gives ? arena.offset_of(call.in.data) : 0;
    slot.out_offset = op.stages_out      ? kStaged
                      : op.remote_out    ? kRemote
                      : op.second_half() ? arena.offset_of(call.out.data)
                                         : 0;
    slot.remote = {static_cast<const std::byte*>(call.in.data), static_cast<const std::byte*>(call.out.data)};
    slot.stage_offset = tiles_ ? arena.offset_of(tiles_.data()) : 0;
    if (call.kind == OpKind::all_to_all && op.ragged())
      for (int j = 0; j < size_; ++j) own().part_offsets(j)[op.sequence % 2] = op.gives(j).offset;
    op.taken_a.assign(static_cast<std::size_t>(size_), 0);
    op.taken_b.assign(static_cast<std::size_t>(size_), 0);
    if (!op.stages_in) own().head().staged.value.store(encode(op.sequence, kAllRounds));
  }
  slot.sequence.store(op.sequence);
  op.stage = Op::Stage::announced;
  notify();
}

std::size_t Group::tiles_bytes() const { return kTiles * tile_bytes(size_) * static_cast<std::size_t>(size_ + 1); }

bool Group::see_arrivals(Op& op) {
  const int before = op.arrived;
  while (op.arrived < size_ &&
         (op.arrived == rank_ || port(op.arrived).slot(op.sequence).sequence.load() >= op.sequence))
    ++op.arrived;
  if (op.arrived < size_) return op.arrived != before;
  check_mismatch(op);
  op.stage = Op::Stage::running;
  if (op.eager) return true;
  op.any_staged = op.stages_in || op.stages_out;
  for (int k = 0; k < size_; ++k) {
    if (k == rank_) continue;
    const Slot& slot = port(k).slot(op.sequence);
    Peer& peer = peers_[static_cast<std::size_t>(k)];
    const std::byte* window = window_of(k);
    const auto place = [&](std::uint64_t offset, const std::byte* address) {
      return offset == kStaged ? nullptr : offset == kRemote ? address : window + offset;
    };
    peer.in = place(slot.in_offset, slot.remote.in);
    peer.out = place(slot.out_offset, slot.remote.out);
    peer.remote_in = slot.in_offset == kRemote;
    peer.remote_out = slot.out_offset == kRemote;
    peer.tiles = window + slot.stage_offset;
    op.any_staged |= peer.in == nullptr || peer.out == nullptr;
    op.any_remote |= peer.remote_in;
  }
  return true;
}

/// One bounded piece of work of whatever can be done now.
bool Group::run_tiles(Op& op) {
  if (op.stages_in && stage_input(op)) return true;
  if (op.reduces() ? reduce_round(op) : copy_round(op)) return true;
  if (op.second_half() && copy_results(op)) return true;
  // All of mine done?
  if (op.stages_in && op.staged < rounds_given(op)) return false;
  if (op.reduces()) {
    if (op.reduced < rounds_for(op, op.reads(rank_).count)) return false;
  } else {
    for (int k = 0; k < size_; ++k)
      if (op.taken_a[static_cast<std::size_t>(k)] < rounds_for(op, op.reads(k).count)) return false;
  }
  if (op.second_half())
    for (int k = 0; k < size_; ++k)
      if (k != rank_ && op.taken_b[static_cast<std::size_t>(k)] < rounds_for(op, op.result_slice(k).count))
        return false;
  PortHead& head = own().head();
  head.staged.value.store(encode(op.sequence, kAllRounds));
  head.phase_a.value.store(encode(op.sequence, kAllRounds));
  head.phase_b.value.store(encode(op.sequence, kAllRounds));
  notify();
  op.stage = Op::Stage::draining;
  op.arrived = 0;
  return true;
}

/// Done when every peer has read what it wants of mine; its last flag says so.
bool Group::finish_collective(Op& op) {
  const int before = op.arrived;
  while (op.arrived < size_ &&
         (op.arrived == rank_ || rounds_of(port(op.arrived).head().phase_b.value.load(), op.sequence) == kAllRounds))
    ++op.arrived;
  if (op.arrived < size_) return op.arrived != before;
  // A peer that gave up may have let its caller write into what we read.
  if (peer_failed()) return true;
  collectives_.pop();
  complete(op, Op::kGood);
  return true;
}

void Group::publish(std::atomic<std::uint64_t>& flag, const Op& op, std::uint64_t rounds) noexcept {
  flag.store(encode(op.sequence, rounds));
  notify();
}

/// Rounds of my tiles that every reader is done with.
std::uint64_t Group::slowest_reader(const Op& op, bool results) const {
  std::uint64_t slowest = kAllRounds;
  for (int j = 0; j < size_; ++j) {
    if (j == rank_ || (!results && op.gives(j).count == 0)) continue;
    const PortHead& head = ports_[static_cast<std::size_t>(j)].head();
    slowest = std::min(slowest, rounds_of((results ? head.phase_b : head.phase_a).value.load(), op.sequence));
  }
  return slowest;
}

/// Layout of the tiles: kTiles for the inputs, each with a part for every reader; then kTiles for the results.
std::size_t Group::tile_offset(const Op& op, std::uint64_t round, int reader, bool result) const {
  const auto n = static_cast<std::uint64_t>(size_);
  const std::uint64_t turn = round % kTiles;
  return op.round_bytes * (result ? kTiles * n + turn : turn * n + static_cast<std::uint64_t>(reader));
}

std::byte* Group::own_tile(const Op& op, std::uint64_t round, int reader, bool result) {
  return tiles_.bytes_at(tile_offset(op, round, reader, result));
}

/// Where a block from the process of `source` lies while it is added.
std::byte* Group::fetched_tile(const Op& op, int source) {
  if (!fetched_)
    fetched_ =
        host_->arena().allocate(op.round_bytes * static_cast<std::size_t>(size_), MemoryUse::communication, ledger_);
  return fetched_.bytes_at(op.round_bytes * static_cast<std::size_t>(source));
}

bool Group::stage_input(Op& op) {
  const std::uint64_t rounds = rounds_given(op);
  if (op.staged >= rounds || op.staged >= slowest_reader(op, false) + kTiles) return false;
  const std::size_t size = size_of(op.call.in.dtype);
  const auto* in = static_cast<const std::byte*>(op.call.in.data);
  for (int j = 0; j < size_; ++j) {
    if (j == rank_) continue;
    const Slice block = block_of(op, op.gives(j), op.staged);
    if (block.count == 0) continue;
    copy_bytes(own_tile(op, op.staged, op.shares_input() ? 0 : j, false), in + block.offset * size, block.count * size,
               false);
    if (op.shares_input()) break;
  }
  ++op.staged;
  publish(own().head().staged.value, op, op.staged == rounds ? kAllRounds : op.staged);
  return true;
}

/// Where the block of `round` of what `source` gives me lies.
const std::byte* Group::source_block(const Op& op, int source, Slice whole, std::uint64_t round) const {
  const std::size_t size = size_of(op.call.in.dtype);
  const Slice block = block_of(op, whole, round);
  if (source == rank_) {
    const std::size_t mine = op.ragged() && op.call.kind == OpKind::all_to_all ? op.gives(rank_).offset : 0;
    return static_cast<const std::byte*>(op.call.in.data) + (mine + block.offset) * size;
  }
  const Peer& peer = peers_[static_cast<std::size_t>(source)];
  if (peer.in == nullptr) return peer.tiles + tile_offset(op, round, op.shares_input() ? 0 : rank_, false);
  std::size_t begins = 0;
  if (op.ragged() && op.call.kind == OpKind::all_to_all)
    begins = ports_[static_cast<std::size_t>(source)].part_offsets(rank_)[op.sequence % 2];
  return peer.in + (begins + block.offset) * size;
}

bool Group::reduce_round(Op& op) {
  const Slice whole = op.reads(rank_);
  const std::uint64_t rounds = rounds_for(op, whole.count);
  const std::uint64_t round = op.reduced;
  if (round >= rounds) return false;
  for (int k = 0; k < size_; ++k)
    if (k != rank_ && rounds_of(port(k).head().staged.value.load(), op.sequence) <= round) return false;
  if (op.stages_out && round >= slowest_reader(op, true) + kTiles) return false;

  const std::size_t size = size_of(op.call.in.dtype);
  const std::uint64_t end = std::min(rounds, round + (op.any_staged || op.any_remote ? 1 : kAtOnce));
  const Slice block = blocks_of(op, whole, round, end);
  for (int k = 0; k < size_; ++k) {
    const std::byte* from = source_block(op, k, whole, round);
    if (k != rank_ && peers_[static_cast<std::size_t>(k)].remote_in) {
      std::byte* tile = fetched_tile(op, k);
      if (!read_remote(board(k).pid.load(), from, tile, block.count * size)) return false;  // see copy_round
      from = tile;
    }
    sources_[static_cast<std::size_t>(k)] = from;
  }
  for (int k = 0; k < size_; ++k) credit(op, k, block.count * size);
  // Results land where the slice lies in all_reduce, from the start in the other two.
  std::byte* out =
      static_cast<std::byte*>(op.call.out.data) + (op.lands_at(rank_) + block.offset - whole.offset) * size;
  combine(op, sources_, out, block.count);
  if (op.stages_out) copy_bytes(own_tile(op, round, 0, true), out, block.count * size, false);
  op.reduced = end;
  if (op.any_staged || end % kAtOnce == 0 || end == rounds)
    publish(own().head().phase_a.value, op, end == rounds ? kAllRounds : end);
  return true;
}

bool Group::copy_round(Op& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn <= size_; ++turn) {
    const int k = (rank_ + turn) % size_;  // each rank begins with another source; its own is for when nobody is ready
    std::uint64_t& taken = op.taken_a[static_cast<std::size_t>(k)];
    const Slice whole = op.reads(k);
    if (taken >= rounds_for(op, whole.count)) continue;
    if (k != rank_ && rounds_of(port(k).head().staged.value.load(), op.sequence) <= taken) continue;
    const bool remote = k != rank_ && peers_[static_cast<std::size_t>(k)].remote_in;
    const bool staged = k != rank_ && peers_[static_cast<std::size_t>(k)].in == nullptr;
    const std::uint64_t end = std::min(rounds_for(op, whole.count), taken + (staged ? 1 : kAtOnce));
    const Slice block = blocks_of(op, whole, taken, end);
    std::byte* out = static_cast<std::byte*>(op.call.out.data) + (op.lands_at(k) + block.offset - whole.offset) * size;
    const std::byte* from = source_block(op, k, whole, taken);
    if (!remote) {
      copy_bytes(out, from, block.count * size, op.streaming);
    } else if (!read_remote(board(k).pid.load(), from, out, block.count * size)) {
      continue;  // it has died: who watches the ranks says so
    }
    credit(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.taken_a[static_cast<std::size_t>(j)];
      if (j != rank_ && done < rounds_for(op, op.reads(j).count)) slowest = std::min(slowest, done);
    }
    if (op.any_staged && k != rank_) publish(own().head().phase_a.value, op, slowest);
    return true;
  }
  return false;
}

bool Group::copy_results(Op& op) {
  const std::size_t size = size_of(op.call.in.dtype);
  for (int turn = 1; turn < size_; ++turn) {
    const int k = (rank_ + turn) % size_;
    std::uint64_t& taken = op.taken_b[static_cast<std::size_t>(k)];
    const Slice whole = op.result_slice(k);
    if (taken >= rounds_for(op, whole.count)) continue;
    if (rounds_of(port(k).head().phase_a.value.load(), op.sequence) <= taken) continue;
    const Peer& peer = peers_[static_cast<std::size_t>(k)];
    const std::uint64_t there =
        std::min(rounds_for(op, whole.count), rounds_of(port(k).head().phase_a.value.load(), op.sequence));
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
    credit(op, k, block.count * size);
    taken = end;
    std::uint64_t slowest = kAllRounds;
    for (int j = 0; j < size_; ++j) {
      const std::uint64_t done = op.taken_b[static_cast<std::size_t>(j)];
      if (j != rank_ && done < rounds_for(op, op.result_slice(j).count)) slowest = std::min(slowest, done);
    }
    // The last word, that all is read, is said in run_tiles.
    if (op.any_staged && slowest != kAllRounds) publish(own().head().phase_b.value, op, slowest);
    return true;
  }
  return false;
}

}  // namespace tessera::shm
