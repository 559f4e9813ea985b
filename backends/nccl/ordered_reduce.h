// Reductions in the order of the tree: grouped messages and a kernel of our own.
#pragma once

#include <cstddef>

#include "backends/nccl/calls.h"

namespace tessera::comm::nccl {

/// Whether the call goes this way: all reductions in the deterministic mode; else what the vendor can't do, rounds
/// otherwise, or loses NaN in. False where this build has no kernels.
bool uses_tree(const NcclApi& api, const OpDesc& call, int ranks, bool deterministic);

/// Memory of the device that the call needs between its two steps.
std::size_t workspace_bytes(const OpDesc& call, int ranks, int rank);

/// Every rank gets the others' pieces of what it adds. Returns as issue() does; when that has been taken in ...
ncclResult_t issue_exchange(const LaunchTarget& target, const OpDesc& call);
/// ... it adds them, and hands the sum on where all need it.
ncclResult_t issue_sum(const LaunchTarget& target, const OpDesc& call);

}  // namespace tessera::comm::nccl
