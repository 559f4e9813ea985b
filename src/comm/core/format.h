// Names of operations in errors, logs and the table of a mismatch.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// "all_reduce #12 (layer.3)", "recv from rank 2 #1"; number 0 is omitted.
TESSERA_API std::string describe(const OpDesc& call, std::uint64_t sequence);

/// "rank 1"; "rank 1 (3 of the job)" if a rank of a communicator has another number in the job.
TESSERA_API std::string describe_rank(int rank, int global_rank);

/// "rank 1 has closed its communicator", and the reason if it sent `first_failure_cause`.
TESSERA_API std::string describe_leaving(const std::string& rank, const std::string& first_failure_cause);

/// Elements of the larger of the two buffers on a rank that uses both; the same on every rank, except for all_to_all_v,
/// for which it is 0.
TESSERA_API std::size_t larger_count(const OpDesc& call, int ranks);

/// Elements of one rank's part if all parts are equal, or of the whole operation if it has no parts; the same on every
/// rank.
TESSERA_API std::size_t part_count(const OpDesc& call, int ranks);

/// "all_reduce of 12 f32 sum", "broadcast of 12 f32 root 3": what must be equal on all ranks.
TESSERA_API std::string signature(const OpDesc& call, int ranks);
/// The same for `count` elements, unless the lengths of the parts differ.
std::string signature(OpKind kind, std::size_t count, DType dtype, ReduceOp::Kind reduce, int root);
/// The same with the label, "all_gather of 12 f32 (layer.3)": what checked mode compares.
TESSERA_API std::string checked_signature(const OpDesc& call, int ranks);

}  // namespace tessera::comm
