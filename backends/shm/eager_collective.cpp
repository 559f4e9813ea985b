#include "backends/shm/eager_collective.h"

#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {

void EagerCollective::run(const ShmOperation& op) {
  const OpDesc& call = op.call;
  if (call.kind == OpKind::barrier) return;
  const int rank = members_.rank();
  const int ranks = members_.size();
  const std::size_t size = size_of(call.in.dtype);
  for (int k = 0; k < ranks; ++k) members_.count_sent(op, k, op.layout.sent_slice(k).count * size);
  const auto payload = [&](int k) {
    return k == rank ? static_cast<const std::byte*>(call.in.data)
                     : static_cast<const std::byte*>(members_.of(k).slot(op.sequence).payload);
  };
  auto* out = static_cast<std::byte*>(call.out.data);
  if (op.layout.reduces()) {
    const Slice whole = op.layout.read_slice(rank);
    if (whole.count == 0) return;
    for (int k = 0; k < ranks; ++k) sources_[static_cast<std::size_t>(k)] = payload(k) + whole.offset * size;
    members_.read_factors(op, factors_);
    reduce_tree(call.op, call.in.dtype, sources_, factors_, out + op.layout.output_offset(rank) * size, whole.count);
    return;
  }
  for (int k = 0; k < ranks; ++k) {
    const Slice whole = op.layout.read_slice(k);
    if (whole.count == 0) continue;
    copy_bytes(out + op.layout.output_offset(k) * size, payload(k) + whole.offset * size, whole.count * size, false);
  }
}

}  // namespace tessera::comm::shm
