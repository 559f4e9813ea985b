// Reductions in tree order: grouped messages and a kernel of this library.
#pragma once

#include <cstddef>

#include "backends/nccl/calls.h"

namespace tessera::comm::nccl {

/// Whether the call uses the tree: all reductions in deterministic mode; else those that NCCL does not support, rounds
/// differently, or loses NaN in. False if this build has no kernels.
bool uses_tree(const NcclApi& api, const OpDesc& call, int ranks, bool deterministic);

/// Device memory that the call needs between its two steps.
std::size_t workspace_bytes(const OpDesc& call, int ranks, int rank);

/// Sends each rank the slices that it reduces. Returns as issue() does; once that is enqueued ...
void issue_exchange(const LaunchTarget& target, const OpDesc& call);
/// ... reduces the slices and distributes the result to the ranks that need it.
void issue_sum(const LaunchTarget& target, const OpDesc& call);

/// Whether the call is NCCL's sum and then a division here: an average of bf16 whose factor NCCL would round.
bool divides_afterwards(const NcclApi& api, const OpDesc& call);
/// Divides this rank's result of the sum.
void issue_division(const LaunchTarget& target, const OpDesc& call);

}  // namespace tessera::comm::nccl
