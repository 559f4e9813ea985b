// The conversions of elementwise.h, compiled once per instruction set (see hwy/foreach_target.h): loops that the
// compiler vectorizes.
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
void convert_loop(const In* in, Out* out, std::size_t count) {
  TESSERA_INDEPENDENT_ITERATIONS
  for (std::size_t i = 0; i < count; ++i) out[i] = base::from_float<Out>(base::to_float(in[i]));
}

void f32_to_f16(const float* in, base::f16* out, std::size_t count) { convert_loop(in, out, count); }
void f32_to_bf16(const float* in, base::bf16* out, std::size_t count) { convert_loop(in, out, count); }
void f16_to_f32(const base::f16* in, float* out, std::size_t count) { convert_loop(in, out, count); }
void bf16_to_f32(const base::bf16* in, float* out, std::size_t count) { convert_loop(in, out, count); }
void f16_to_bf16(const base::f16* in, base::bf16* out, std::size_t count) { convert_loop(in, out, count); }
void bf16_to_f16(const base::bf16* in, base::f16* out, std::size_t count) { convert_loop(in, out, count); }

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
namespace {

HWY_EXPORT(f32_to_f16);
HWY_EXPORT(f32_to_bf16);
HWY_EXPORT(f16_to_f32);
HWY_EXPORT(bf16_to_f32);
HWY_EXPORT(f16_to_bf16);
HWY_EXPORT(bf16_to_f16);

template <class Loop>
void in_tiles(ThreadPool& pool, std::size_t count, Loop&& loop) {
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) { loop(begin, end - begin); });
}

}  // namespace

void convert(ThreadPool& pool, const float* in, base::f16* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) { HWY_DYNAMIC_DISPATCH(f32_to_f16)(in + at, out + at, n); });
}
void convert(ThreadPool& pool, const float* in, base::bf16* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) {
    HWY_DYNAMIC_DISPATCH(f32_to_bf16)(in + at, out + at, n);
  });
}
void convert(ThreadPool& pool, const base::f16* in, float* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) { HWY_DYNAMIC_DISPATCH(f16_to_f32)(in + at, out + at, n); });
}
void convert(ThreadPool& pool, const base::bf16* in, float* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) {
    HWY_DYNAMIC_DISPATCH(bf16_to_f32)(in + at, out + at, n);
  });
}
void convert(ThreadPool& pool, const base::f16* in, base::bf16* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) {
    HWY_DYNAMIC_DISPATCH(f16_to_bf16)(in + at, out + at, n);
  });
}
void convert(ThreadPool& pool, const base::bf16* in, base::f16* out, std::size_t count) {
  in_tiles(pool, count, [&](std::size_t at, std::size_t n) {
    HWY_DYNAMIC_DISPATCH(bf16_to_f16)(in + at, out + at, n);
  });
}

}  // namespace tessera::nn::kernels
#endif
