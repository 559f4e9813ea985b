// The eager algorithm for small collectives: the announcement carries the payload, so one exchange suffices.
#include <algorithm>

#include "backends/shm/shm_group.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {

void ShmGroup::combine(const ShmOperation& op, std::span<const void* const> sources, std::byte* out,
                       std::size_t count) {
  if (op.call.op.kind == ReduceOp::Kind::premul_sum)
    for (int k = 0; k < size_; ++k)
      factors_[static_cast<std::size_t>(k)] = k == rank_ ? op.call.op.scalar : port(k).slot(op.sequence).factor;
  reduce_tree(op.call.op, op.call.in.dtype, sources, factors_, out, count, op.streaming);
}

/// All ranks have arrived, so all payloads are available.
void ShmGroup::run_eager(ShmOperation& op) {
  const OpDesc& call = op.call;
  if (call.kind == OpKind::barrier) return;
  const std::size_t size = size_of(call.in.dtype);
  for (int k = 0; k < size_; ++k) count_sent(op, k, op.sent_slice(k).count * size);
  const auto payload = [&](int k) {
    return k == rank_ ? static_cast<const std::byte*>(call.in.data)
                      : static_cast<const std::byte*>(port(k).slot(op.sequence).payload);
  };
  auto* out = static_cast<std::byte*>(call.out.data);
  if (op.reduces()) {
    const Slice whole = op.read_slice(rank_);
    if (whole.count == 0) return;
    for (int k = 0; k < size_; ++k) {
      sources_[static_cast<std::size_t>(k)] = payload(k) + whole.offset * size;
    }
    combine(op, sources_, out + op.output_offset(rank_) * size, whole.count);
    return;
  }
  for (int k = 0; k < size_; ++k) {
    const Slice whole = op.read_slice(k);
    if (whole.count == 0) continue;
    copy_bytes(out + op.output_offset(k) * size, payload(k) + whole.offset * size, whole.count * size, false);
  }
}

}  // namespace tessera::comm::shm
