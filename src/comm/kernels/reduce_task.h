// The arguments that reduce_tree passes to its kernels.
#pragma once

#include <cstddef>
#include <span>

#include "tessera/base/dtype.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The most ranks that one communicator may have.
inline constexpr std::size_t kMaxRanks = 1024;

/// Bytes that a streaming store writes at once.
inline constexpr std::size_t kStreamLine = 64;

struct ReduceTask {
  ReduceOp op;
  DType dtype;
  std::span<const void* const> sources;
  std::span<const double> factors;
  void* out;
  std::size_t count;
  bool streaming;  ///< only where `out` begins on a cache line
};

}  // namespace tessera::comm
