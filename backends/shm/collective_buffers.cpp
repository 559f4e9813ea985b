#include "backends/shm/collective_buffers.h"

#include <algorithm>
#include <bit>

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

}  // namespace tessera::comm::shm
