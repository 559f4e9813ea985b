#include "backends/nccl/calls.h"

#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "backends/nccl/cuda_objects.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/op_traits.h"

namespace tessera::comm::nccl {
namespace {

/// `factor` as an element.
std::array<std::byte, 8> scalar_of(DType dtype, double factor) {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](auto value) { std::memcpy(bytes.data(), &value, sizeof(value)); };
  base::with_dtype(dtype, [&]<class T>(T) {
    if constexpr (std::is_integral_v<T>)  // little-endian: the low bytes are the element, as in other backends' sums
      put(static_cast<std::int64_t>(factor));
    else if constexpr (std::is_same_v<T, double>)
      put(factor);
    else
      put(T(static_cast<float>(factor)));
  });
  return bytes;
}

/// Issues one operation as NCCL calls.
class Issue {
 public:
  Issue(const LaunchTarget& target, const OpDesc& call)
      : t_(target), c_(call), plan_(call, target.rank, target.size), type_(vendor_type(call.in.dtype)) {}

  void run() const {
    switch (c_.kind) {
      case OpKind::all_reduce:
        return all_reduce();
      case OpKind::all_gather:
        return all_gather();
      case OpKind::reduce_scatter:
        return reduce_scatter();
      case OpKind::broadcast:
        if (c_.out.count == 0) return;
        return check(t_.api.ncclBroadcast(c_.in.data, c_.out.data, c_.out.count, type_, c_.root, t_.comm, t_.stream),
                     "ncclBroadcast");
      case OpKind::reduce:
        return reduce();
      case OpKind::gather:
        return gather();
      case OpKind::scatter:
        return scatter();
      case OpKind::all_to_all:
        return all_to_all();
      case OpKind::send:
      case OpKind::recv:
        return message();
      case OpKind::barrier:
        break;
    }
    check(t_.api.ncclAllReduce(t_.scratch, t_.scratch, 1, ncclUint8, ncclSum, t_.comm, t_.stream), "ncclAllReduce");
  }

  void message() const {
    if (c_.kind == OpKind::send) return send(c_.in.data, c_.in.count, c_.root);
    recv(c_.out.data, c_.out.count, c_.root);
  }

 private:
  void send(const void* data, std::size_t count, int peer) const { nccl::send(t_, data, count, c_.in.dtype, peer); }
  void recv(void* data, std::size_t count, int peer) const { nccl::recv(t_, data, count, c_.in.dtype, peer); }
  /// Copies what a rank would send to itself.
  void keep(std::byte* to, const std::byte* from, std::size_t count) const {
    if (to == from || count == 0) return;
    check_cuda(t_.api,
               t_.api.cudaMemcpyAsync(to, from, count * size_of(c_.in.dtype), cudaMemcpyDeviceToDevice, t_.stream),
               "cudaMemcpyAsync");
  }

  void all_reduce() const {
    if (c_.in.count == 0) return;
    const NcclReduceOp op(t_, c_.op, c_.in.dtype);
    check(t_.api.ncclAllReduce(c_.in.data, c_.out.data, c_.in.count, type_, op.get(), t_.comm, t_.stream),
          "ncclAllReduce");
  }
  void all_gather() const {
    if (c_.out.count == 0) return;
    if (c_.out_counts.empty())
      return check(t_.api.ncclAllGather(c_.in.data, c_.out.data, c_.in.count, type_, t_.comm, t_.stream),
                   "ncclAllGather");
    GroupCall group(t_.api);
    for (int root = 0; root < t_.size; ++root)
      if (const Slice part = plan_.part_of_out(root); part.count != 0)
        check(t_.api.ncclBroadcast(root == t_.rank ? c_.in.data : nullptr, at(c_.out, part.offset), part.count, type_,
                                   root, t_.comm, t_.stream),
              "ncclBroadcast");
    group.end();
  }
  void reduce_scatter() const {
    if (c_.in.count == 0) return;
    const NcclReduceOp op(t_, c_.op, c_.in.dtype);
    if (c_.in_counts.empty())
      return check(t_.api.ncclReduceScatter(c_.in.data, c_.out.data, c_.out.count, type_, op.get(), t_.comm, t_.stream),
                   "ncclReduceScatter");
    GroupCall group(t_.api);
    for (int root = 0; root < t_.size; ++root)
      if (const Slice part = plan_.part_of_in(root); part.count != 0)
        check(t_.api.ncclReduce(at(c_.in, part.offset), root == t_.rank ? c_.out.data : nullptr, part.count, type_,
                                op.get(), root, t_.comm, t_.stream),
              "ncclReduce");
    group.end();
  }
  void reduce() const {
    if (c_.in.count == 0) return;
    const NcclReduceOp op(t_, c_.op, c_.in.dtype);
    check(t_.api.ncclReduce(c_.in.data, c_.out.data, c_.in.count, type_, op.get(), c_.root, t_.comm, t_.stream),
          "ncclReduce");
  }
  void gather() const {
    if (t_.rank != c_.root) return send(c_.in.data, c_.in.count, c_.root);
    keep(at(c_.out, plan_.part_of_out(t_.rank).offset), at(c_.in, 0), c_.in.count);
    exchange();
  }
  void scatter() const {
    if (t_.rank != c_.root) return recv(c_.out.data, c_.out.count, c_.root);
    keep(at(c_.out, 0), at(c_.in, plan_.part_of_in(t_.rank).offset), c_.out.count);
    exchange();
  }
  void all_to_all() const {
    const Slice own = plan_.part_of_in(t_.rank);
    keep(at(c_.out, plan_.part_of_out(t_.rank).offset), at(c_.in, own.offset), own.count);
    exchange();
  }
  /// The other ranks' parts.
  void exchange() const {
    GroupCall group(t_.api);
    for (int peer = 0; peer < t_.size; ++peer) {
      if (peer == t_.rank) continue;
      const Slice given = parts_of_in(c_.kind) ? plan_.part_of_in(peer) : Slice{};
      const Slice taken = parts_of_out(c_.kind) ? plan_.part_of_out(peer) : Slice{};
      send(at(c_.in, given.offset), given.count, peer);
      recv(at(c_.out, taken.offset), taken.count, peer);
    }
    group.end();
  }

  const LaunchTarget& t_;
  const OpDesc& c_;
  const ReadPlan plan_;
  const ncclDataType_t type_;
};

}  // namespace

Capabilities make_capabilities(int size, bool deterministic) {
  Capabilities all;
  all.backend = "nccl";
  all.dtypes.assign(kDTypes.begin(), kDTypes.end());
  all.memory = {MemoryKind::device};
  all.deterministic = deterministic || size == 1;
  all.rounding_ulps =
      deterministic
          ? 0.5
          : 0.5 * (size - 1) + 1;  // each hop rounds; avg and premul_sum also round the factor and the product
  return all;
}

void require_supported(const OpDesc& call, int ranks) {
  if (reduces(call.kind) && call.in.count != 0 && !has_vendor_op(call.op.kind, call.in.dtype))
    throw Unsupported(std::string(name_of(call.kind)) + ": NCCL has no " + std::string(name_of(call.op.kind)) + " of " +
                      std::string(name_of(call.in.dtype)) + ", and this build has no CUDA kernels for it");
  if (reduces(call.kind) && call.op.kind == ReduceOp::Kind::avg && !is_floating(call.in.dtype) &&
      call.op.scalar != ranks && call.op.scalar != 1)
    throw Unsupported(std::string(name_of(call.kind)) + ": backend nccl divides a sum of " +
                      std::string(name_of(call.in.dtype)) + " by the number of its ranks only, which is " +
                      std::to_string(ranks) + ", not by " + std::to_string(static_cast<std::int64_t>(call.op.scalar)));
}

void issue(const LaunchTarget& target, const OpDesc& call) { Issue(target, call).run(); }

void issue_batch(const LaunchTarget& target, std::span<const OpDesc> parts) {
  GroupCall group(target.api);
  for (const OpDesc& part : parts) Issue(target, part).message();
  group.end();
}

ncclDataType_t vendor_type(DType dtype) {
  constexpr std::array<ncclDataType_t, kDTypes.size()> kTypes = {ncclFloat32, ncclFloat64, ncclFloat16, ncclBfloat16,
                                                                 ncclInt8,    ncclUint8,   ncclInt32,   ncclInt64,
                                                                 ncclUint32,  ncclUint64,  ncclFloat16, ncclUint8};
  return kTypes[static_cast<std::size_t>(dtype)];
}

bool has_vendor_op(ReduceOp::Kind kind, DType dtype) {
  if (dtype == DType::boolean) return kind != ReduceOp::Kind::bit_xor;
  return dtype != DType::i16 && kind < ReduceOp::Kind::bit_and;
}

NcclReduceOp::NcclReduceOp(const LaunchTarget& target, const ReduceOp& op, DType dtype) : target_(target) {
  using Kind = ReduceOp::Kind;
  // By kind. Bits are those of bool; has_vendor_op() leaves out bit_xor.
  constexpr std::array<ncclRedOp_t, kReduceKinds> kOps = {ncclSum, ncclAvg, ncclProd, ncclMin, ncclMax,
                                                          ncclSum, ncclMin, ncclMax,  ncclSum};
  op_ = op.kind == Kind::sum && dtype == DType::boolean ? ncclMax : kOps[static_cast<std::size_t>(op.kind)];
  if (op.kind == Kind::avg && op.scalar != target.size) {
    op_ = ncclSum;
    if (op.scalar != 1) create(1 / op.scalar, dtype);
  } else if (op.kind == Kind::premul_sum) {
    create(op.scalar, dtype);
  }
}

NcclReduceOp::~NcclReduceOp() {
  if (owned_) target_.api.ncclRedOpDestroy(op_, target_.comm);
}

void NcclReduceOp::create(double factor, DType dtype) {
  std::array<std::byte, 8> scalar = scalar_of(dtype, factor);
  check(target_.api.ncclRedOpCreatePreMulSum(&op_, scalar.data(), vendor_type(dtype), ncclScalarHostImmediate,
                                             target_.comm),
        "ncclRedOpCreatePreMulSum");
  owned_ = true;
}

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
