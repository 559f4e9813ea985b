// The conversions of elementwise.h: base's exact scalar ones over arrays (a few bit operations an element).
#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/tiles.h"

namespace tessera::nn::kernels {
namespace {
template <class In, class Out>
void convert_range(ThreadPool& pool, const In* in, Out* out, std::size_t count) {
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) out[i] = static_cast<Out>(static_cast<float>(in[i]));
  });
}
}  // namespace

void convert(ThreadPool& pool, const float* in, base::f16* out, std::size_t count) { convert_range(pool, in, out, count); }
void convert(ThreadPool& pool, const float* in, base::bf16* out, std::size_t count) { convert_range(pool, in, out, count); }
void convert(ThreadPool& pool, const base::f16* in, float* out, std::size_t count) { convert_range(pool, in, out, count); }
void convert(ThreadPool& pool, const base::bf16* in, float* out, std::size_t count) { convert_range(pool, in, out, count); }
void convert(ThreadPool& pool, const base::f16* in, base::bf16* out, std::size_t count) { convert_range(pool, in, out, count); }
void convert(ThreadPool& pool, const base::bf16* in, base::f16* out, std::size_t count) { convert_range(pool, in, out, count); }

}  // namespace tessera::nn::kernels
