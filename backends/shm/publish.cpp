// What a rank publishes when a collective begins: its call, and where peers find its data.
#include <algorithm>
#include <bit>
#include <cstring>

#include "backends/shm/shm_group.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {
namespace {

/// Largest input in ordinary memory that is copied to memory that peers map: a copy costs less than one system call for
/// each reader, and the owner need not wait until the last reader is done.
constexpr std::size_t kCopiedBytes = std::size_t{1} << 20;
/// The same for broadcasts. A broadcast has one writer, so readers can follow it through tiles, which stay in the
/// caches: tiles are never slower than a copy of several rounds between two ranks, and among more ranks up to
/// kCopiedBytes.
constexpr std::size_t kCopiedBroadcast = std::size_t{256} << 10;
constexpr std::size_t kLeastCopies = std::size_t{64} << 10;

/// Copies what peers read of this rank's input to the same places in `to`.
void copy_given(const ShmOperation& op, std::byte* to) {
  const std::size_t size = size_of(op.call.in.dtype);
  const auto* in = static_cast<const std::byte*>(op.call.in.data);
  const auto copy = [&](std::size_t begin, std::size_t end) {
    if (begin < end) std::memcpy(to + begin * size, in + begin * size, (end - begin) * size);
  };
  if (!op.sends_input()) return;
  if (op.shares_input()) return copy(0, op.call.in.count);
  const Slice own = op.sent_slice(op.me);
  copy(0, own.offset);
  copy(own.offset + own.count, op.call.in.count);
}

}  // namespace

/// True if all ranks have announced the previous operation, hence are done with the one before it, whose slot this one
/// reuses.
bool ShmGroup::has_room(const ShmOperation& op) {
  if (room_seen_ + 1 >= op.sequence) return true;
  for (int k = 0; k < size_; ++k)
    if (k != rank_ && announced_by(k) + 1 < op.sequence) return false;
  room_seen_ = op.sequence - 1;
  return true;
}

void ShmGroup::announce(ShmOperation& op) {
  const OpDesc& call = op.call;
  CollectiveSlot& slot = own().slot(op.sequence);
  std::uint64_t in_offset = 0;
  std::uint64_t out_offset = 0;
  if (op.eager) {
    copy_given(op, slot.payload);
  } else {
    choose_places(op);
    Arena& staging = host_->staging();
    const auto offset = [&](bool staged, bool remote, bool copied, const void* memory) -> std::uint64_t {
      if (staged) return kStaged;
      if (remote) return kRemote;
      return copied ? staging.offset_of(copies_[op.sequence % 2].data()) : host_->arena().offset_of(memory);
    };
    if (op.sends_input()) in_offset = offset(op.stages_in, op.remote_in, op.copied_in, call.in.data);
    if (op.second_half()) out_offset = offset(op.stages_out, op.remote_out, op.copied_out, call.out.data);
    slot.remote = {static_cast<const std::byte*>(call.in.data), static_cast<const std::byte*>(call.out.data)};
    slot.stage_offset = tiles_ ? staging.offset_of(tiles_.data()) : 0;
    if (call.kind == OpKind::all_to_all && op.ragged())
      for (int j = 0; j < size_; ++j) own().part_offsets(j)[op.sequence % 2] = op.sent_slice(j).offset;
    op.taken_a.assign(static_cast<std::size_t>(size_), 0);
    op.taken_b.assign(static_cast<std::size_t>(size_), 0);
    if (op.copied_in && op.rounds_given() == 1) {  // else later, in rounds, so that peers can start with the first
      copy_given(op, copies_[op.sequence % 2].bytes_at(0));
      op.staged = 1;
    }
  }
  // Written after the payload: peers already poll the cache line that these fields share with the sequence number.
  slot.in_offset = in_offset;
  slot.out_offset = out_offset;
  slot.hints = static_cast<std::uint8_t>((op.copied_in ? kCopiedIn : 0) | (op.copied_out ? kCopiedOut : 0) |
                                         (op.awaits_readers() ? kAwaitsReaders : 0) |
                                         (!op.fills() || op.staged > 0 ? kAllThere : 0));
  slot.fingerprint = op.fingerprint;
  slot.count = op.table_count();
  slot.kind = call.kind;
  slot.dtype = call.in.dtype;
  slot.reduce = call.op.kind;
  slot.root = call.root;
  slot.factor = call.op.scalar;
  slot.sequence.store(op.sequence);
  op.stage = ShmOperation::Stage::announced;
  notify();
}

/// Windows are read in place. Ordinary memory is copied whole; if it is larger, it goes through tiles where these are
/// fast enough (sums, broadcasts), else peers read it from this process.
void ShmGroup::choose_places(ShmOperation& op) {
  const OpDesc& call = op.call;
  const Arena& arena = host_->arena();
  const std::size_t bytes = call.in.bytes();
  op.round_bytes = tile_bytes();
  op.streaming = (bytes + call.out.bytes()) * static_cast<std::size_t>(size_) > host_->cache_bytes();
  const bool broadcast = call.kind == OpKind::broadcast;
  const std::size_t most = !broadcast ? kCopiedBytes : size_ == 2 ? tile_bytes() : kCopiedBroadcast;
  const bool copies = bytes <= most;
  const bool tiles = op.reduces() || (broadcast && (size_ == 2 || bytes <= kCopiedBytes));
  const bool remote = host_->reads_remote();
  if (op.sends_input() && !arena.mapping()->holds(call.in.data, bytes)) {
    op.copied_in = copies;
    op.remote_in = !copies && remote && !tiles;
    op.stages_in = !copies && !op.remote_in;
  }
  if (op.second_half() && !arena.mapping()->holds(call.out.data, call.out.bytes())) {
    op.copied_out = copies;
    op.remote_out = !copies && remote;
    op.stages_out = !copies && !remote;
  }
  if ((op.stages_in || op.stages_out) && !tiles_)
    tiles_ = host_->staging().allocate(tiles_bytes(), MemoryCategory::communication, memory_tracker_);
  if (!op.copied_in && !op.copied_out) return;
  Buffer& copy = copies_[op.sequence % 2];
  if (!copy || copy.bytes() < bytes) {
    copy.reset();  // no rank reads it any more: see has_room()
    copy = host_->staging().allocate(std::bit_ceil(std::max(bytes, kLeastCopies)), MemoryCategory::communication,
                                     memory_tracker_);
  }
  const std::size_t size = size_of(call.in.dtype);
  for (int j = 0; j < size_; ++j) {
    if (op.copied_in) count_sent(op, j, op.sent_slice(j).count * size);
    if (op.copied_out) count_sent(op, j, op.owned_slice(rank_).count * size);
  }
}

}  // namespace tessera::comm::shm
