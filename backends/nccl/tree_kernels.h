// Kernels of this library for what NCCL lacks, if this module was built with a CUDA compiler.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "tessera/comm/kernels/reduce_element-inl.h"

namespace tessera::comm::nccl {

/// Each rank's slice lies at `slices` + rank * stride, except the own slice.
struct TreeReduceArgs {
  comm::ReduceOp op;
  base::DType dtype;
  int ranks;
  int own;
  const void* own_slice;
  const void* slices;
  std::size_t stride;     ///< bytes
  const double* factors;  ///< premul_sum: one for each rank, on the device
  void* out;              ///< may be own_slice
  std::size_t count;
};

template <class T>
TESSERA_HD void tree_element(const TreeReduceArgs& work, std::size_t i) {
  const auto leaf = [&](int rank) {
    const void* const slice = rank == work.own ? work.own_slice
                                               : static_cast<const unsigned char*>(work.slices) +
                                                     static_cast<std::size_t>(rank) * work.stride;
    return comm::sum_leaf(work.op, static_cast<const T*>(slice)[i], work.factors[rank]);
  };
  static_cast<T*>(work.out)[i] = comm::sum_element<T>(work.op, leaf, work.ranks);
}

struct TreeKernels {
  /// Loads all of these kernels on the current device, so that no launch does.
  cudaError_t (*load)();
  /// Enqueues the tree reduction of all slices into `work.out`.
  cudaError_t (*reduce)(const TreeReduceArgs& work, cudaStream_t stream);
  /// Enqueues *to = value, on the device.
  cudaError_t (*store)(double* to, double value, cudaStream_t stream);
};

/// Null if this build has none.
const TreeKernels* tree_kernels();

}  // namespace tessera::comm::nccl
