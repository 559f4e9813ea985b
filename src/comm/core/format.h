// How errors, logs and the table of a mismatch name an operation.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// "all_reduce #12 (layer.3)", "recv from rank 2 #1": the number is left out where it is 0.
TESSERA_API std::string describe(const OpDesc& call, std::uint64_t sequence);

/// "rank 1"; "rank 1 (3 of the job)" where a rank of a communicator is another one among all ranks.
TESSERA_API std::string describe_rank(int rank, int job_rank);

/// "rank 1 has closed its communicator", and why where it said `first_failure_cause`.
TESSERA_API std::string describe_leaving(const std::string& rank, const std::string& first_failure_cause);

/// Elements of the larger of the two buffers on a rank where both are looked at; the same on every rank, except for
/// all_to_all_v, where it is 0.
TESSERA_API std::size_t larger_count(const OpDesc& call, int ranks);

/// Elements of one rank's part where all are equal, of the whole operation where it has no parts; the same on every
/// rank.
TESSERA_API std::size_t part_count(const OpDesc& call, int ranks);

/// "all_reduce of 12 f32 sum", "broadcast of 12 f32 root 3": what must be equal on all ranks.
TESSERA_API std::string signature(const OpDesc& call, int ranks);
/// The same with the label, "all_gather of 12 f32 (layer.3)": what checked mode compares.
TESSERA_API std::string checked_signature(const OpDesc& call, int ranks);

}  // namespace tessera::comm
