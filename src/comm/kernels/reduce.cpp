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
#include <bit>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/fp_environment.h"

namespace tessera::comm {
namespace {

HWY_EXPORT(combine_all);
HWY_EXPORT(stream_copy);

/// The task with the arithmetic of a kernel that exists: bool is u8, and bits have no sign.
ReduceTask computed(ReduceTask task) {
  if (task.dtype == DType::boolean) {
    task.dtype = DType::u8;
    if (task.op.kind == ReduceOp::Kind::sum || task.op.kind == ReduceOp::Kind::max) task.op = ReduceOp::bit_or();
    if (task.op.kind == ReduceOp::Kind::prod || task.op.kind == ReduceOp::Kind::min) task.op = ReduceOp::bit_and();
  } else if (task.op.kind >= ReduceOp::Kind::bit_and) {
    constexpr std::array kBySize = {DType::u8, DType::i16, DType::u32, DType::u64};
    task.dtype = kBySize[static_cast<std::size_t>(std::countr_zero(size_of(task.dtype)))];
  }
  return task;
}

}  // namespace

void reduce_tree(const ReduceOp& op, DType dtype, std::span<const void* const> sources, std::span<const double> factors,
                 void* out, std::size_t count, bool streaming) {
  const base::FpEnvironment environment;
  const bool whole_lines = reinterpret_cast<std::uintptr_t>(out) % kStreamLine == 0;
  HWY_DYNAMIC_DISPATCH(combine_all)
  (computed({op, dtype, sources, factors, out, count, streaming && whole_lines}));
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
