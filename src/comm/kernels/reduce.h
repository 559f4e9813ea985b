// Reductions over several sources, and copies: the arithmetic of all host backends.
#pragma once

#include <cstddef>
#include <span>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// out[i] = op over k of sources[k][i], following the tree of slices.h over the order of the sources; f16 and bf16 are
/// computed in f32 and rounded once, in the default FpEnvironment. The bits don't depend on alignment, position or
/// machine, except which payload a NaN has. `out` may be one of the sources; otherwise it must overlap none.
/// `op.scalar` must hold avg's divisor; `factors` has one entry per source for premul_sum, otherwise it is ignored.
/// `streaming` uses stores that bypass the caches, for working sets much larger than these.
TESSERA_API void reduce_tree(const ReduceOp& op, DType dtype, std::span<const void* const> sources,
                             std::span<const double> factors, void* out, std::size_t count, bool streaming = false);

/// memcpy; `streaming` as above.
TESSERA_API void copy_bytes(void* out, const void* in, std::size_t bytes, bool streaming);

}  // namespace tessera::comm
