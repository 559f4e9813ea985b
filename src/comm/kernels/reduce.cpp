// Compiled once for every instruction set that Highway knows, and selected at run time. The loops are plain C++: the
// compiler vectorizes them for each target, and without contraction every element is computed with the same IEEE
// operations in any lane or tail.
#include "tessera/comm/kernels/reduce.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/comm/kernels/reduce.cpp"
#include <hwy/foreach_target.h>  // includes this file again for each target

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "tessera/comm/kernels/reduce_kernels-inl.h"

#if HWY_ONCE
#include <array>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

HWY_EXPORT(combine_all);
HWY_EXPORT(stream_copy);

}  // namespace

void reduce_tree(const ReduceOp& op, DType dtype, std::span<const void* const> sources, std::span<const double> factors,
                 void* out, std::size_t count, bool streaming) {
  const bool whole_lines = reinterpret_cast<std::uintptr_t>(out) % kStreamLine == 0;
  const ReduceTask work{op, dtype, sources, factors, out, count, streaming && whole_lines};
  HWY_DYNAMIC_DISPATCH(combine_all)(work);
}

void copy_bytes(void* out, const void* in, std::size_t bytes, bool streaming) {
  if (bytes == 0 || out == in) return;
  if (!streaming || bytes < 4096) {
    std::memcpy(out, in, bytes);
  } else {
    HWY_DYNAMIC_DISPATCH(stream_copy)(static_cast<std::uint8_t*>(out), static_cast<const std::uint8_t*>(in), bytes);
  }
}

}  // namespace tessera::comm
#endif
