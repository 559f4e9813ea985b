// Checked mode (TESSERA_CHECK): the members compare their calls before an operation counts as done. NCCL itself hangs
// or computes wrong results if they differ.
#include "backends/nccl/nccl_group.h"

namespace tessera::comm::nccl {

void NcclGroup::announce(const NcclOperation::OpInfo& what) {
  world_->tell(
      *this,
      {.kind = ControlMessage::Kind::call, .communicator = id_, .number = what.sequence, .text = what.signature});
  hear_call(world_->rank(), what.sequence, what.signature);
}

bool NcclGroup::agreed_locked(const NcclOperation& op) const {
  if (op.what.signature.empty()) return true;
  const auto found = agreements_.find(op.what.sequence);
  return found != agreements_.end() && found->second.reached;
}

void NcclGroup::hear_call(int world_rank, std::uint64_t sequence, const std::string& signature) noexcept {
  const int member = member_of(world_rank);
  if (member < 0) return;
  std::string table;
  {
    const std::lock_guard lock(mutex_);
    Agreement& agreement = agreements_[sequence];
    agreement.signatures.resize(members_.size());
    agreement.signatures[static_cast<std::size_t>(member)] = signature;
    if (++agreement.here < members_.size()) return;
    agreement.reached = true;
    for (const std::string& one : agreement.signatures) agreement.reached = agreement.reached && one == signature;
    if (agreement.reached) return;
    for (std::size_t k = 0; k < members_.size(); ++k)
      table += (k == 0 ? " rank " : "; rank ") + std::to_string(k) + ": " + agreement.signatures[k];
  }
  fail({FailureKind::mismatch, "operation #" + std::to_string(sequence) + " differs between the ranks:" + table}, true);
}

}  // namespace tessera::comm::nccl
