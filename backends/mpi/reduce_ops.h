// MPI datatypes and operations for this library's element types and reductions.
#pragma once

#include <mpi.h>

#include <array>

#include "tessera/comm/types.h"

namespace tessera::comm::mpi {

/// f16, bf16 and bool are transferred as integers of their size: only this library's operations compute with them.
MPI_Datatype mpi_type(DType dtype) noexcept;

/// Reduce operations, nearly all implemented by this library: MPI has no 16-bit floats, and its minimum and maximum may
/// lose a NaN; MPICH 4.0 compares unsigned integers as signed ones, and Open MPI 4.1 adds bytes without wrapping.
/// Created on first use, under the engine's lock.
class MpiReduceOps {
 public:
  /// `kind`: sum, prod, min, max or one of the bits.
  MPI_Op of(ReduceOp::Kind kind, DType dtype) noexcept;
  /// Frees the created operations.
  void free() noexcept;

 private:
  std::array<std::array<MPI_Op, kReduceKinds>, kDTypes.size()> own_ = [] {  // by type and kind
    decltype(own_) none;
    for (auto& row : none) row.fill(MPI_OP_NULL);
    return none;
  }();
};

}  // namespace tessera::comm::mpi
