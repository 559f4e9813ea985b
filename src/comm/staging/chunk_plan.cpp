#include "tessera/comm/staging/chunk_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/core/format.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::staging {
namespace {

/// Elements of the longest part, the same on every rank that can compute it.
std::size_t longest(const OpDesc& call, int ranks) {
  const std::span<const std::size_t> counts = parts_of_out(call.kind) ? call.out_counts : call.in_counts;
  return counts.empty() ? part_count(call, ranks) : *std::ranges::max_element(counts);
}

}  // namespace

ChunkPlan::ChunkPlan(const OpDesc& call, int rank, int ranks, std::size_t chunk_bytes)
    : kind_(call.kind),
      size_(size_of(call.in.dtype)),
      rank_(static_cast<std::size_t>(rank)),
      ranks_(static_cast<std::size_t>(ranks)),
      in_(side(call.in, call.in_counts, parts_of_in(call.kind))),
      out_(side(call.out, call.out_counts, parts_of_out(call.kind))) {
  if (kind_ == OpKind::all_to_all && in_.ragged) {  // no rank knows the others' lengths: one chunk
    step_ = std::numeric_limits<std::size_t>::max() / 2;
    return;
  }
  const bool parted = parts_of_in(kind_) || parts_of_out(kind_);
  const std::size_t whole = std::max<std::size_t>(chunk_bytes / size_ / (parted ? ranks_ : 1), 1);
  const std::size_t unit = parted ? 16 : ranks_;
  step_ = whole <= unit ? (parted ? whole : unit) : whole / unit * unit;
  chunks_ = std::max<std::size_t>((longest(call, ranks) + step_ - 1) / step_, 1);
}

ChunkPlan::BufferSide ChunkPlan::side(const ConstView& view, std::span<const std::size_t> counts, bool parted) const {
  BufferSide made;
  made.here = view.data != nullptr && view.count != 0;
  made.ragged = !counts.empty();
  if (made.ragged) {
    made.counts.assign(counts.begin(), counts.end());
  } else if (parted) {
    made.counts.assign(ranks_, view.count / ranks_);
  } else {
    made.counts = {view.count};
  }
  return made;
}

void ChunkPlan::append_segments(const BufferSide& side, std::size_t from, std::size_t at,
                                std::vector<CopySegment>& segments) const {
  std::size_t device = 0;
  for (const std::size_t count : side.counts) {
    const std::size_t taken = count > from ? std::min(step_, count - from) : 0;
    if (taken != 0) segments.push_back({(device + from) * size_, at, taken * size_});
    at += taken * size_;
    device += count;
  }
}

std::size_t ChunkPlan::taken(const BufferSide& side, std::size_t from) const {
  const std::vector<std::size_t> counts = counts_of(side, from);
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

std::vector<std::size_t> ChunkPlan::counts_of(const BufferSide& side, std::size_t from) const {
  std::vector<std::size_t> counts;
  for (const std::size_t count : side.counts) counts.push_back(count > from ? std::min(step_, count - from) : 0);
  return counts;
}

Chunk ChunkPlan::chunk(std::size_t index) const {
  const std::size_t from = index * step_;
  Chunk made;
  if (in_.ragged) made.in_counts = counts_of(in_, from);
  if (out_.ragged) made.out_counts = counts_of(out_, from);
  made.in_count = in_.here ? taken(in_, from) : 0;
  made.out_count = out_.here ? taken(out_, from) : 0;
  const auto own_part = [&](const BufferSide& side) {
    const std::vector<std::size_t> counts = counts_of(side, from);
    const auto own = counts.begin() + static_cast<std::ptrdiff_t>(rank_);
    return std::accumulate(counts.begin(), own, std::size_t{0}) * size_;
  };
  if (kind_ == OpKind::all_to_all) {  // the only one that doesn't work in place
    made.out_at = (made.in_count * size_ + kAlignment - 1) / kAlignment * kAlignment;
  } else if (parts_of_out(kind_) && out_.here) {
    made.in_at = own_part(out_);
  } else if (parts_of_in(kind_) && in_.here) {
    made.out_at = own_part(in_);
  }
  if (in_.here) append_segments(in_, from, made.in_at, made.down);
  if (out_.here) append_segments(out_, from, made.out_at, made.up);
  made.bytes = std::max(made.in_at + made.in_count * size_, made.out_at + made.out_count * size_);
  return made;
}

}  // namespace tessera::comm::staging
