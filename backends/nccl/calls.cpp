#include "backends/nccl/calls.h"

#include <numeric>

#include "backends/nccl/cuda_objects.h"
#include "backends/nccl/group_call.h"
#include "backends/nccl/reduce_op.h"
#include "tessera/base/error.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::nccl {
namespace {

/// Division of a buffer into parts, one for each rank, in elements.
class Parts {
 public:
  Parts(std::span<const std::size_t> counts, std::size_t equal) : counts_(counts), equal_(equal) {}
  std::size_t count(int rank) const { return counts_.empty() ? equal_ : counts_[static_cast<std::size_t>(rank)]; }
  std::size_t offset(int rank) const {
    if (counts_.empty()) return equal_ * static_cast<std::size_t>(rank);
    return std::accumulate(counts_.begin(), counts_.begin() + rank, std::size_t{0});
  }

 private:
  std::span<const std::size_t> counts_;
  std::size_t equal_;
};

const std::byte* at(const ConstView& view, std::size_t element) {
  return static_cast<const std::byte*>(view.data) + element * size_of(view.dtype);
}
std::byte* at(const View& view, std::size_t element) {
  return static_cast<std::byte*>(view.data) + element * size_of(view.dtype);
}

/// Issues one operation as NCCL calls.
class Issue {
 public:
  Issue(const LaunchTarget& target, const OpDesc& call)
      : t_(target), c_(call), type_(vendor_type(call.in.dtype)), ranks_(static_cast<std::size_t>(target.size)) {}

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
  void send(const void* data, std::size_t count, int peer) const {
    if (count == 0) return;  // the peer does not receive either
    check(t_.api.ncclSend(data, count, type_, peer, t_.comm, t_.stream), "ncclSend");
  }
  void recv(void* data, std::size_t count, int peer) const {
    if (count == 0) return;
    check(t_.api.ncclRecv(data, count, type_, peer, t_.comm, t_.stream), "ncclRecv");
  }
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
    const Parts parts(c_.out_counts, 0);
    GroupCall group(t_.api);
    for (int root = 0; root < t_.size; ++root)
      if (parts.count(root) != 0)
        check(t_.api.ncclBroadcast(root == t_.rank ? c_.in.data : nullptr, at(c_.out, parts.offset(root)),
                                   parts.count(root), type_, root, t_.comm, t_.stream),
              "ncclBroadcast");
    group.end();
  }
  void reduce_scatter() const {
    if (c_.in.count == 0) return;
    const NcclReduceOp op(t_, c_.op, c_.in.dtype);
    if (c_.in_counts.empty())
      return check(t_.api.ncclReduceScatter(c_.in.data, c_.out.data, c_.out.count, type_, op.get(), t_.comm, t_.stream),
                   "ncclReduceScatter");
    const Parts parts(c_.in_counts, 0);
    GroupCall group(t_.api);
    for (int root = 0; root < t_.size; ++root)
      if (parts.count(root) != 0)
        check(t_.api.ncclReduce(at(c_.in, parts.offset(root)), root == t_.rank ? c_.out.data : nullptr,
                                parts.count(root), type_, op.get(), root, t_.comm, t_.stream),
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
    const Parts parts(c_.out_counts, c_.in.count);
    if (t_.rank != c_.root) return send(c_.in.data, c_.in.count, c_.root);
    keep(at(c_.out, parts.offset(t_.rank)), at(c_.in, 0), c_.in.count);
    GroupCall group(t_.api);
    for (int peer = 0; peer < t_.size; ++peer)
      if (peer != t_.rank) recv(at(c_.out, parts.offset(peer)), parts.count(peer), peer);
    group.end();
  }
  void scatter() const {
    const Parts parts(c_.in_counts, c_.out.count);
    if (t_.rank != c_.root) return recv(c_.out.data, c_.out.count, c_.root);
    keep(at(c_.out, 0), at(c_.in, parts.offset(t_.rank)), c_.out.count);
    GroupCall group(t_.api);
    for (int peer = 0; peer < t_.size; ++peer)
      if (peer != t_.rank) send(at(c_.in, parts.offset(peer)), parts.count(peer), peer);
    group.end();
  }
  void all_to_all() const {
    const Parts sends(c_.in_counts, c_.in.count / ranks_);
    const Parts receives(c_.out_counts, c_.out.count / ranks_);
    keep(at(c_.out, receives.offset(t_.rank)), at(c_.in, sends.offset(t_.rank)), sends.count(t_.rank));
    GroupCall group(t_.api);
    for (int peer = 0; peer < t_.size; ++peer) {
      if (peer == t_.rank) continue;
      send(at(c_.in, sends.offset(peer)), sends.count(peer), peer);
      recv(at(c_.out, receives.offset(peer)), receives.count(peer), peer);
    }
    group.end();
  }

  const LaunchTarget& t_;
  const OpDesc& c_;
  const ncclDataType_t type_;
  const std::size_t ranks_;
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
  const bool reduces =
      call.kind == OpKind::all_reduce || call.kind == OpKind::reduce_scatter || call.kind == OpKind::reduce;
  if (reduces && call.op.kind == ReduceOp::Kind::avg && !is_floating(call.in.dtype) && call.op.scalar != ranks &&
      call.op.scalar != 1)
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

std::uint64_t bytes_to(const OpDesc& call, int ranks, int rank, int peer) {
  if (peer == rank) return 0;
  const std::uint64_t size = size_of(call.in.dtype);
  switch (call.kind) {
    case OpKind::all_reduce:
      return (slice_of(call.in.count, ranks, peer).count + slice_of(call.in.count, ranks, rank).count) * size;
    case OpKind::all_gather:
      return call.in.bytes();
    case OpKind::reduce_scatter:
      return Parts(call.in_counts, call.out.count).count(peer) * size;
    case OpKind::broadcast:
      return rank == call.root ? call.out.bytes() : 0;
    case OpKind::reduce:
    case OpKind::gather:
      return peer == call.root ? call.in.bytes() : 0;
    case OpKind::scatter:
      return rank == call.root ? Parts(call.in_counts, call.out.count).count(peer) * size : 0;
    case OpKind::all_to_all:
      return Parts(call.in_counts, call.in.count / static_cast<std::size_t>(ranks)).count(peer) * size;
    case OpKind::send:
      return peer == call.root ? call.in.bytes() : 0;
    case OpKind::recv:
    case OpKind::barrier:
      break;
  }
  return 0;
}

}  // namespace tessera::comm::nccl
