#include "backends/shm/collective_buffers.h"

#include <algorithm>
#include <bit>

#include "tessera/base/error.h"
#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::shm {
namespace {

/// Largest input in ordinary memory that is copied to memory that peers map: a copy costs less than one system call for
/// each reader, and the owner need not wait until the last reader is done.
constexpr std::size_t kCopiedBytes = std::size_t{1} << 20;
/// The same where ranks gather or exchange, the kernel can copy from the owner's process, and each rank has a core.
constexpr std::size_t kCopiedGather = std::size_t{128} << 10;
/// The same for broadcasts. A broadcast has one writer, so readers can follow it through tiles: these are never slower
/// than a copy of several rounds between two ranks, and among more ranks up to kCopiedBytes.
constexpr std::size_t kCopiedBroadcast = std::size_t{256} << 10;
constexpr std::size_t kMinCopies = std::size_t{64} << 10;

}  // namespace

/// Windows are read in place. Ordinary memory is copied whole; if it is larger, it goes through tiles where these are
/// fast enough (sums, broadcasts), else peers read it from this process.
void CollectiveBuffers::choose_sources(ShmOperation& op) const {
  const OpDesc& call = op.call;
  const Mapping& windows = *members_.runtime().arena().mapping();
  const std::size_t bytes = call.in.bytes();
  const int ranks = members_.size();
  const bool broadcast = call.kind == OpKind::broadcast;
  const bool cma = members_.runtime().uses_cma();
  const bool gathers = !broadcast && !op.layout.reduces();
  const std::size_t most = gathers && cma && members_.runtime().has_own_cores() ? kCopiedGather
                           : !broadcast                                         ? kCopiedBytes
                           : ranks == 2                                         ? tile_bytes()
                                                                                : kCopiedBroadcast;
  const bool copies = bytes <= most;
  const bool tiles = op.layout.reduces() || (broadcast && (ranks == 2 || bytes <= kCopiedBytes));
  if (op.layout.sends_input() && !windows.holds(call.in.data, bytes)) {
    op.copied_in = copies;
    op.cma_in = !copies && cma && !tiles;
    op.stages_in = !copies && !op.cma_in;
  }
  if (op.layout.second_half() && !windows.holds(call.out.data, call.out.bytes())) {
    op.copied_out = copies;
    op.cma_out = !copies && cma;
    op.stages_out = !copies && !cma;
  }
}

void CollectiveBuffers::choose(ShmOperation& op) {
  const OpDesc& call = op.call;
  const std::size_t bytes = call.in.bytes();
  const auto ranks = static_cast<std::size_t>(members_.size());
  op.round_bytes = tile_bytes();
  op.streaming = (bytes + call.out.bytes()) * ranks > members_.runtime().cache_bytes();
  choose_sources(op);
  if ((op.stages_in || op.stages_out) && !tiles_) tiles_ = members_.allocate(kTiles * tile_bytes() * (ranks + 1));
  if (!op.copied_in && !op.copied_out) return;
  Buffer& copy = copy_of(op);
  if (!copy || copy.bytes() < bytes) {
    copy.reset();  // no rank reads it any more: see Announcements::has_room()
    copy = members_.allocate(std::bit_ceil(std::max(bytes, kMinCopies)));
  }
  const std::size_t size = size_of(call.in.dtype);
  for (int j = 0; j < members_.size(); ++j) {
    if (op.copied_in) members_.count_sent(op, j, op.layout.sent_slice(j).count * size);
    if (op.copied_out) members_.count_sent(op, j, op.layout.owned_slice(members_.rank()).count * size);
  }
}

std::uint64_t CollectiveBuffers::offset_of(bool staged, bool cma, bool copied, const ShmOperation& op,
                                           const void* memory) const {
  if (staged) return kViaTiles;
  if (cma) return kViaCma;
  ShmRuntime& runtime = members_.runtime();
  return copied ? runtime.staging().offset_of(copies_[op.sequence % 2].data()) : runtime.arena().offset_of(memory);
}

std::uint64_t CollectiveBuffers::input_offset(const ShmOperation& op) const {
  return op.layout.sends_input() ? offset_of(op.stages_in, op.cma_in, op.copied_in, op, op.call.in.data) : 0;
}

std::uint64_t CollectiveBuffers::result_offset(const ShmOperation& op) const {
  return op.layout.second_half() ? offset_of(op.stages_out, op.cma_out, op.copied_out, op, op.call.out.data) : 0;
}

std::uint64_t CollectiveBuffers::tiles_offset() const {
  return tiles_ ? members_.runtime().staging().offset_of(tiles_.data()) : 0;
}

std::size_t CollectiveBuffers::tile_offset(const ShmOperation& op, std::uint64_t round, int reader, bool result) const {
  const auto n = static_cast<std::uint64_t>(members_.size());
  const std::uint64_t turn = round % kTiles;
  return op.round_bytes * (result ? kTiles * n + turn : turn * n + static_cast<std::uint64_t>(reader));
}

void CollectiveBuffers::retire(ShmRuntime::RetiredBlock& retired) {
  retired.tiles = std::move(tiles_);
  retired.copies = std::move(copies_);
}

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
