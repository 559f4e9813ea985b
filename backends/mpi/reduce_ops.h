// Our element types and reductions as MPI's.
#pragma once

#include <mpi.h>

#include <array>

#include "tessera/comm/base_names.h"
#include "tessera/comm/types.h"

namespace tessera::comm::mpi {

/// f16 and bf16 travel as integers of their size: only our own operations calculate with them.
MPI_Datatype mpi_type(DType dtype) noexcept;

/// Nearly all are ours. MPI has no 16-bit floats, and its minimum and maximum may lose a NaN; MPICH 4.0 compares
/// unsigned integers as signed ones, and Open MPI 4.1 adds bytes without wrapping. Made when first asked for, under the
/// engine's lock.
class MpiReduceOps {
 public:
  /// sum, prod, min or max.
  MPI_Op of(ReduceOp::Kind kind, DType dtype) noexcept;
  /// Gives back what was made.
  void free() noexcept;

 private:
  static constexpr std::size_t kKinds = 4;
  static constexpr std::size_t kTypes = 10;
  std::array<std::array<MPI_Op, kKinds>, kTypes> own_ = [] {
    std::array<std::array<MPI_Op, kKinds>, kTypes> none;
    for (auto& row : none) row.fill(MPI_OP_NULL);
    return none;
  }();
};

}  // namespace tessera::comm::mpi
