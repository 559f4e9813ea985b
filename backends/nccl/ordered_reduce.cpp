
#include <cmath>

#include "backends/nccl/calls.h"
#include "backends/nccl/cuda_objects.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::nccl {
namespace {

using Kind = ReduceOp::Kind;

constexpr std::size_t kAligned = 256;
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAligned - 1) / kAligned * kAligned; }

/// The slice of `in` that a rank reduces.
Slice owned(const OpDesc& call, int ranks, int rank) { return ReadPlan(call, rank, ranks).given(rank); }

/// The workspace: the ranks' factors, then their slices.
class Layout {
 public:
  Layout(const OpDesc& call, int ranks, int rank)
      : ranks_(static_cast<std::size_t>(ranks)),
        stride_(aligned(owned(call, ranks, rank).count * size_of(call.in.dtype))) {}
  std::size_t stride() const { return stride_; }
  std::size_t bytes() const { return slices_at() + ranks_ * stride_; }
  double* factors(void* workspace) const { return static_cast<double*>(workspace); }
  std::byte* slice(void* workspace, int rank) const {
    return static_cast<std::byte*>(workspace) + slices_at() + static_cast<std::size_t>(rank) * stride_;
  }

 private:
  std::size_t slices_at() const { return aligned(ranks_ * sizeof(double)); }
  const std::size_t ranks_;
  const std::size_t stride_;
};

/// Whether 1 / divisor is a number of f16 and bf16, so that NCCL's factor is exact.
bool divides_exactly(double divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5 && std::abs(exponent) < 14;
}

}  // namespace

bool uses_tree(const NcclApi& api, const OpDesc& call, int ranks, bool deterministic) {
  if (!reduces(call.kind) || api.tree == nullptr || call.in.count == 0) return false;
  if (deterministic || !has_vendor_op(call.op.kind, call.in.dtype)) return true;
  const bool floating = is_floating(call.in.dtype);
  switch (call.op.kind) {
    case Kind::min:
    case Kind::max:
      return floating;
    case Kind::premul_sum:
      return floating && size_of(call.in.dtype) == 2;
    case Kind::avg:
      // A sum of f16 may overflow before it is divided.
      if (floating) return call.in.dtype == DType::f16 && !divides_exactly(call.op.scalar);
      return call.op.scalar != ranks && call.op.scalar != 1;
    default:
      return false;
  }
}

std::size_t workspace_bytes(const OpDesc& call, int ranks, int rank) { return Layout(call, ranks, rank).bytes(); }

void issue_exchange(const LaunchTarget& t, const OpDesc& call) {
  const Layout layout(call, t.size, t.rank);
  double* const factors = layout.factors(t.workspace);
  const bool multiplies = call.op.kind == Kind::premul_sum;
  if (multiplies) check_cuda(t.api, t.api.tree->store(factors + t.rank, call.op.scalar, t.stream), "a kernel");
  if (t.size == 1) return;
  const Slice mine = owned(call, t.size, t.rank);
  GroupCall group(t.api);
  for (int peer = 0; peer < t.size; ++peer) {
    if (peer == t.rank) continue;
    const Slice theirs = owned(call, t.size, peer);
    if (theirs.count != 0) {
      send(t, at(call.in, theirs.offset), theirs.count, call.in.dtype, peer);
      if (multiplies) send(t, factors + t.rank, 1, DType::f64, peer);
    }
    if (mine.count != 0) {
      recv(t, layout.slice(t.workspace, peer), mine.count, call.in.dtype, peer);
      if (multiplies) recv(t, factors + peer, 1, DType::f64, peer);
    }
  }
  group.end();
}

void issue_sum(const LaunchTarget& t, const OpDesc& call) {
  const Layout layout(call, t.size, t.rank);
  const Slice mine = owned(call, t.size, t.rank);
  const bool everywhere = call.kind == OpKind::all_reduce;
  auto* const out = static_cast<std::byte*>(call.out.data);
  const std::size_t size = size_of(call.in.dtype);
  if (mine.count != 0) {
    const TreeReduceArgs work{.op = call.op,
                              .dtype = call.in.dtype,
                              .ranks = t.size,
                              .own = t.rank,
                              .own_slice = at(call.in, mine.offset),
                              .slices = layout.slice(t.workspace, 0),
                              .stride = layout.stride(),
                              .factors = layout.factors(t.workspace),
                              .out = everywhere ? out + mine.offset * size : out,
                              .count = mine.count};
    check_cuda(t.api, t.api.tree->reduce(work, t.stream), "a kernel");
  }
  if (!everywhere || t.size == 1) return;
  GroupCall group(t.api);
  for (int peer = 0; peer < t.size; ++peer) {
    if (peer == t.rank) continue;
    const Slice theirs = owned(call, t.size, peer);
    if (mine.count != 0) send(t, out + mine.offset * size, mine.count, call.in.dtype, peer);
    if (theirs.count != 0) recv(t, out + theirs.offset * size, theirs.count, call.in.dtype, peer);
  }
  group.end();
}

bool divides_afterwards(const NcclApi& api, const OpDesc& call) {
  return reduces(call.kind) && api.tree != nullptr && call.in.count != 0 && call.op.kind == Kind::avg &&
         call.in.dtype == DType::bf16 && !divides_exactly(call.op.scalar);
}

void issue_division(const LaunchTarget& t, const OpDesc& call) {
  if (call.kind == OpKind::reduce && t.rank != call.root) return;
  // The average of one rank's elements.
  const TreeReduceArgs work{.op = call.op,
                            .dtype = call.in.dtype,
                            .ranks = 1,
                            .own = 0,
                            .own_slice = call.out.data,
                            .slices = nullptr,
                            .stride = 0,
                            .factors = static_cast<const double*>(t.scratch),
                            .out = call.out.data,
                            .count = call.out.count};
  check_cuda(t.api, t.api.tree->reduce(work, t.stream), "a kernel");
}

}  // namespace tessera::comm::nccl
