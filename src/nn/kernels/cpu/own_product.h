// This library's matrix products, with the same bits on every processor.
#pragma once

#include "tessera/nn/kernels/gemm.h"

namespace tessera::nn::kernels {

/// g's product in the calling thread. Every element of C is one chain of fused multiply-adds in OpMath<T>: it starts at
/// bias[column], at C if g accumulates, or at 0, and takes the terms in the order of k; half-precision results are
/// rounded once. So the bits depend neither on the processor nor on how a product is divided by rows or columns, nor,
/// in f32 and f64, along k into products that accumulate. T: float, double, bf16, f16. The strides of g must be given;
/// `bias` [n] may be null, and excludes accumulation. The thread keeps the memory of the packed blocks, at most 3 MiB.
template <class T>
void multiply_own(const GemmArgs<T>& g, const T* bias);

}  // namespace tessera::nn::kernels
