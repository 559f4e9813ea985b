#include "backends/shm/operation.h"

#include <algorithm>
#include <bit>

#include "tessera/comm/kernels/reduce.h"

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

void CollectiveLayout::reset(const OpDesc& call, bool all_inputs) {
  const auto set_starts = [](std::vector<std::size_t>& starts, std::span<const std::size_t> counts) {
    starts.clear();
    if (counts.empty()) return;
    starts.push_back(0);
    for (const std::size_t count : counts) starts.push_back(starts.back() + count);
  };
  set_starts(in_starts_, call.in_counts);
  set_starts(out_starts_, call.out_counts);
  kind_ = call.kind;
  dtype_ = call.in.dtype;
  root_ = call.root;
  in_count_ = call.in.count;
  out_count_ = call.out.count;
  symmetric_ = all_inputs;
}

bool CollectiveLayout::shares_input() const {
  return kind_ == OpKind::all_gather || kind_ == OpKind::broadcast || writes_root(kind_) || symmetric_;
}

Slice CollectiveLayout::owned_slice(int owner) const { return slice_of(in_count_, ranks_, owner); }

Slice CollectiveLayout::read_slice(int source) const {
  switch (kind_) {
    case OpKind::all_reduce:
      return symmetric_ ? Slice{0, in_count_} : owned_slice(rank_);
    case OpKind::reduce_scatter:
      return part(in_starts_, in_count_, ranks_, rank_);
    case OpKind::all_gather:
      return {0, part(out_starts_, out_count_, ranks_, source).count};
    case OpKind::broadcast:
      return {0, source == root_ ? out_count_ : 0};
    case OpKind::reduce:
      return {0, rank_ == root_ ? in_count_ : 0};
    case OpKind::gather:
      return {0, rank_ == root_ ? part(out_starts_, out_count_, ranks_, source).count : 0};
    case OpKind::scatter: {
      const auto own = static_cast<std::size_t>(rank_);
      return {in_starts_.empty() ? own * out_count_ : in_starts_[own], source == root_ ? out_count_ : 0};
    }
    case OpKind::all_to_all: {  // in the _v form only the source knows the offset and publishes it
      const std::size_t count = part(out_starts_, out_count_, ranks_, source).count;
      return {ragged() ? 0 : static_cast<std::size_t>(rank_) * count, count};
    }
    default:
      return {};
  }
}

Slice CollectiveLayout::sent_slice(int reader) const {
  switch (kind_) {
    case OpKind::all_reduce:
      return symmetric_ ? Slice{0, in_count_} : owned_slice(reader);
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
      return part(in_starts_, in_count_, ranks_, reader);
    case OpKind::all_gather:
      return {0, in_count_};
    case OpKind::broadcast:
      return {0, rank_ == root_ ? in_count_ : 0};
    case OpKind::reduce:
    case OpKind::gather:
      return {0, reader == root_ ? in_count_ : 0};
    case OpKind::scatter:
      return rank_ == root_ ? part(in_starts_, in_count_, ranks_, reader) : Slice{};
    default:
      return {};
  }
}

bool CollectiveLayout::sends_input() const {
  for (int j = 0; j < ranks_; ++j)
    if (j != rank_ && sent_slice(j).count > 0) return true;
  return false;
}

std::size_t CollectiveLayout::output_offset(int source) const {
  switch (kind_) {
    case OpKind::all_reduce:
      return symmetric_ ? 0 : owned_slice(rank_).offset;
    case OpKind::all_gather:
    case OpKind::gather:
    case OpKind::all_to_all:
      return part(out_starts_, out_count_, ranks_, source).offset;
    default:
      return 0;
  }
}

std::size_t CollectiveLayout::eager_size() const {
  constexpr std::size_t kNever = ~std::size_t{0};
  const std::size_t size = size_of(dtype_);
  const auto n = static_cast<std::size_t>(ranks_);
  switch (kind_) {
    case OpKind::all_reduce:
    case OpKind::reduce_scatter:
    case OpKind::reduce:
      return in_count_ * size;
    case OpKind::broadcast:
      return out_count_ * size;
    case OpKind::all_gather: {
      if (out_starts_.empty()) return in_count_ * size;
      std::size_t longest = 0;
      for (int r = 0; r < ranks_; ++r) longest = std::max(longest, between(out_starts_, r).count);
      return longest * size;
    }
    case OpKind::gather:
    case OpKind::all_to_all:
      return ragged() ? kNever : in_count_ * size;
    case OpKind::scatter:
      return ragged() ? kNever : out_count_ * size * n;
    case OpKind::barrier:
      return 0;
    default:
      return kNever;
  }
}

std::uint64_t CollectiveLayout::table_count() const {
  switch (kind_) {
    case OpKind::reduce_scatter:
    case OpKind::scatter:
    case OpKind::broadcast:
      return out_count_;
    default:
      return in_count_;
  }
}

std::uint64_t CollectiveLayout::fingerprint(const ReduceOp& op) const {
  std::uint64_t hash = mix(1, static_cast<std::uint64_t>(kind_));
  hash = mix(hash, static_cast<std::uint64_t>(dtype_));
  hash = mix(hash, static_cast<std::uint64_t>(root_));
  if (reduces()) {
    hash = mix(hash, static_cast<std::uint64_t>(op.kind));
    if (op.kind == ReduceOp::Kind::avg) hash = mix(hash, std::bit_cast<std::uint64_t>(op.scalar));
  }
  if (!ragged()) return mix(hash, table_count());
  if (kind_ == OpKind::all_to_all) return mix(hash, ~std::uint64_t{0});  // the lengths of others are unknown
  for (const std::size_t start : in_starts_.empty() ? out_starts_ : in_starts_) hash = mix(hash, start);
  return hash;
}

void ShmOperation::reset(const OpDesc& what, std::uint64_t number, bool all_inputs) {
  Operation::reset(what, number);
  layout.reset(what, all_inputs);
  stage = Stage::queued;
  eager = everyone = stages_in = cma_in = copied_in = stages_out = cma_out = copied_out = any_staged = any_awaits =
      streaming = false;
  arrived = 0;
  fingerprint = staged = reduced = 0;
}

std::uint64_t ShmOperation::rounds_for(std::size_t count) const {
  const std::uint64_t elements = round_bytes / size_of(call.in.dtype);
  return (count + elements - 1) / elements;
}

std::uint64_t ShmOperation::rounds_sent() const {
  std::size_t most = 0;
  for (int j = 0; j < layout.ranks(); ++j)
    if (j != layout.rank()) most = std::max(most, layout.sent_slice(j).count);
  return rounds_for(most);
}

void ShmOperation::copy_sent(std::byte* to, StoreChoice& stores) const {
  const std::size_t size = size_of(call.in.dtype);
  const auto* in = static_cast<const std::byte*>(call.in.data);
  const auto copy = [&](std::size_t begin, std::size_t end) {
    if (begin >= end) return;
    const std::size_t bytes = (end - begin) * size;
    stores.write(StoreChoice::Target::copy, call.in.bytes(), bytes,
                 [&](bool streams) { copy_bytes(to + begin * size, in + begin * size, bytes, streams); });
  };
  if (!layout.sends_input()) return;
  if (layout.shares_input()) return copy(0, call.in.count);
  const Slice own = layout.sent_slice(layout.rank());
  copy(0, own.offset);
  copy(own.offset + own.count, call.in.count);
}

namespace {

/// One of so many blocks is written in the other way, to time it.
constexpr std::uint32_t kTriedOneOf = 64;

float median(std::array<float, 3> values) {
  std::ranges::sort(values);
  return values[1];
}

}  // namespace

/// How much faster streaming stores must be, since readers then need longer. A tile is read once, and soon. Other
/// memory may be read several times, also by the program; measured, a gain of 2 there was a loss in all. Cores without
/// a common cache make it 5 to 12.
float StoreChoice::needed_gain(Target target) const noexcept {
  return target == Target::tile && own_cores_ ? 1.5F : 3.0F;
}

StoreChoice::Times& StoreChoice::times_of(Target target, std::size_t operation_bytes) noexcept {
  const auto size = std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(operation_bytes)), kSizes - 1);
  return times_[static_cast<std::size_t>(target)][size];
}

bool StoreChoice::next(Target target, std::size_t operation_bytes) noexcept {
  Times& times = times_of(target, operation_bytes);
  for (const bool streams : {false, true})
    if (times.count[streams ? 1 : 0] < kKept) return streams;
  return (++times.blocks % kTriedOneOf == 0) != times.streams;
}

void StoreChoice::add(Target target, std::size_t operation_bytes, bool streams, float time) noexcept {
  Times& times = times_of(target, operation_bytes);
  const std::size_t kind = streams ? 1 : 0;
  times.last[kind][times.count[kind]++ % kKept] = time;
  if (times.count[0] < kKept || times.count[1] < kKept) return;
  times.streams = median(times.last[0]) > needed_gain(target) * median(times.last[1]);
}

}  // namespace tessera::comm::shm
