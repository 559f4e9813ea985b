// The layout of every collective: which rank reads what from which rank.
#include <algorithm>
#include <bit>
#include <numeric>

#include "backends/shm/operation.h"

namespace tessera::comm::shm {
namespace {

Slice between(const std::vector<std::size_t>& starts, int index) {
  const auto i = static_cast<std::size_t>(index);
  return {starts[i], starts[i + 1] - starts[i]};
}

/// Part `index` of a buffer of `count` elements: as the caller divided it, else in equal parts.
Slice part(const std::vector<std::size_t>& starts, std::size_t count, int ranks, int index) {
  return starts.empty() ? slice_of(count, ranks, index) : between(starts, index);
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

}  // namespace

bool ShmOperation::shares_input() const {
  return call.kind == OpKind::all_gather || call.kind == OpKind::broadcast || call.kind == OpKind::reduce ||
         call.kind == OpKind::gather || symmetric;
}

bool ShmOperation::reduces() const {
  return call.kind == OpKind::all_reduce || call.kind == OpKind::reduce_scatter || call.kind == OpKind::reduce;
}

Slice ShmOperation::owned_slice(int owner) const { return slice_of(call.in.count, ranks, owner); }

Slice ShmOperation::read_slice(int source) const {
  switch (call.kind) {
    case OpKind::all_reduce:
      return symmetric ? Slice{0, call.in.count} : owned_slice(me);
    case OpKind::reduce_scatter:
      return part(in_starts, call.in.count, ranks, me);
    case OpKind::all_gather:
      return {0, part(out_starts, call.out.count, ranks, source).count};
    case OpKind::broadcast:
      return {0, source == call.root ? call.out.count : 0};
    case OpKind::reduce:
      return {0, me == call.root ? call.in.count : 0};
    case OpKind::gather:
      return {0, me == call.root ? part(out_starts, call.out.count, ranks, source).count : 0};
    case OpKind::scatter: {
      const auto own = static_cast<std::size_t>(me);
      return {in_starts.empty() ? own * call.out.count : in_starts[own], source == call.root ? call.out.count : 0};
    }
    case OpKind::all_to_all: {  // in the _v form only the source knows the offset and publishes it
      const std::size_t count = part(out_starts, call.out.count, ranks, source).count;
      return {ragged() ? 0 : static_cast<std::size_t>(me) * count, count};
    }
    default:
      return {};
  }
}

Slice ShmOperation::sent_slice(int reader) const {
  switch (call.kind) {
    case OpKind::all_reduce:
      return symmetric ? Slice{0, call.in.count} : owned_slice(reader);
    case OpKind::reduce_scatter:
      return part(in_starts, call.in.count, ranks, reader);
    case OpKind::all_gather:
      return {0, call.in.count};
    case OpKind::broadcast:
      return {0, me == call.root ? call.in.count : 0};
    case OpKind::reduce:
    case OpKind::gather:
      return {0, reader == call.root ? call.in.count : 0};
    case OpKind::scatter:
      return me == call.root ? part(in_starts, call.in.count, ranks, reader) : Slice{};
    case OpKind::all_to_all:
      return part(in_starts, call.in.count, ranks, reader);
    default:
      return {};
  }
}

bool ShmOperation::sends_input() const {
  for (int j = 0; j < ranks; ++j)
    if (j != me && sent_slice(j).count > 0) return true;
  return false;
}

std::uint64_t ShmOperation::rounds_for(std::size_t count) const {
  const std::uint64_t elements = round_bytes / size_of(call.in.dtype);
  return (count + elements - 1) / elements;
}

std::uint64_t ShmOperation::rounds_given() const {
  std::size_t most = 0;
  for (int j = 0; j < ranks; ++j)
    if (j != me) most = std::max(most, sent_slice(j).count);
  return rounds_for(most);
}

std::size_t ShmOperation::output_offset(int source) const {
  switch (call.kind) {
    case OpKind::all_reduce:
      return symmetric ? 0 : owned_slice(me).offset;
    case OpKind::all_gather:
    case OpKind::gather:
    case OpKind::all_to_all:
      return part(out_starts, call.out.count, ranks, source).offset;
    default:
      return 0;
  }
}

std::size_t ShmOperation::eager_size() const {
  constexpr std::size_t kNever = ~std::size_t{0};
  const std::size_t size = size_of(call.in.dtype);
  const auto n = static_cast<std::size_t>(ranks);
  switch (call.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce_scatter:
    case OpKind::reduce:
      return call.in.bytes();
    case OpKind::broadcast:
      return call.out.bytes();
    case OpKind::all_gather: {
      if (out_starts.empty()) return call.in.bytes();
      std::size_t longest = 0;
      for (int r = 0; r < ranks; ++r) longest = std::max(longest, between(out_starts, r).count);
      return longest * size;
    }
    case OpKind::gather:
      return ragged() ? kNever : call.in.bytes();
    case OpKind::scatter:
      return ragged() ? kNever : call.out.bytes() * n;
    case OpKind::all_to_all:
      return ragged() ? kNever : call.in.bytes();
    case OpKind::barrier:
      return 0;
    default:
      return kNever;
  }
}

std::uint64_t ShmOperation::table_count() const {
  switch (call.kind) {
    case OpKind::reduce_scatter:
    case OpKind::scatter:
    case OpKind::broadcast:
      return call.out.count;
    default:
      return call.in.count;
  }
}

std::uint64_t ShmOperation::make_fingerprint() const {
  std::uint64_t hash = mix(1, static_cast<std::uint64_t>(call.kind));
  hash = mix(hash, static_cast<std::uint64_t>(call.in.dtype));
  hash = mix(hash, static_cast<std::uint64_t>(call.root));
  if (reduces()) {
    hash = mix(hash, static_cast<std::uint64_t>(call.op.kind));
    if (call.op.kind == ReduceOp::Kind::avg) hash = mix(hash, std::bit_cast<std::uint64_t>(call.op.scalar));
  }
  if (!ragged()) return mix(hash, table_count());
  if (call.kind == OpKind::all_to_all) return mix(hash, ~std::uint64_t{0});  // the lengths of others are unknown
  for (const std::size_t start : in_starts.empty() ? out_starts : in_starts) hash = mix(hash, start);
  return hash;
}

}  // namespace tessera::comm::shm
