// The conversions of elementwise.h, compiled once per instruction set (see hwy/foreach_target.h): loops that the
// compiler vectorizes.
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/half_loops-inl.h"
#include "tessera/base/vectorize-inl.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/convert.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class In, class Out>
void convert_range(const void* in, void* out, std::size_t begin, std::size_t end) {
  const In* const from = static_cast<const In*>(in);
  Out* const to = static_cast<Out*>(out);
  TESSERA_INDEPENDENT_ITERATIONS
  for (std::size_t i = begin; i < end; ++i) to[i] = base::from_float<Out>(base::to_float(from[i]));
}

/// Converts elements [begin, end); null: no kernel.
using Loop = void (*)(const void* in, void* out, std::size_t begin, std::size_t end);

template <class In>
Loop loop_to(base::DType to) {
  if (to == base::DType::f32) return &convert_range<In, float>;
  if (to == base::DType::f16) return &convert_range<In, base::f16>;
  return to == base::DType::bf16 ? &convert_range<In, base::bf16> : nullptr;
}

Loop loop_of(base::DType from, base::DType to) {
  if (from == to) return nullptr;
  if (from == base::DType::f32) return loop_to<float>(to);
  if (from == base::DType::f16) return loop_to<base::f16>(to);
  return from == base::DType::bf16 ? loop_to<base::bf16>(to) : nullptr;
}

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
HWY_EXPORT(loop_of);

void convert(ThreadPool& pool, const ConvertArgs& a) {
  const auto loop = HWY_DYNAMIC_DISPATCH(loop_of)(a.from, a.to);
  if (loop == nullptr)
    throw base::Unsupported("convert: no kernel from " + std::string(base::name_of(a.from)) + " to " +
                            std::string(base::name_of(a.to)) + " on the host");
  for_tiles(pool, a.count, kElementTile, [&](std::size_t begin, std::size_t end) { loop(a.in, a.out, begin, end); });
}

}  // namespace tessera::nn::kernels
#endif
