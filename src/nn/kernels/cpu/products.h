// What computes the products of gemm.h: oneDNN, OpenBLAS or this library.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/nn/kernels/gemm.h"

namespace tessera::nn::kernels {

/// gemm() on the calling thread, without tiles. The strides must be given.
void gemm_tile(const GemmArgs<float>& args, Products products);

/// g's product in the calling thread. Every element of C is one chain of fused multiply-adds in OpMath<T>: it starts at
/// bias[column], at C if g accumulates, or at 0, and takes the terms in the order of k; half-precision results are
/// rounded once. So the bits depend neither on the processor nor on how a product is divided by rows or columns, nor,
/// in f32 and f64, along k into products that accumulate. T: float, double, bf16, f16. The strides of g must be given;
/// `bias` [n] may be null, and excludes accumulation. The thread keeps the memory of the packed blocks, at most 3 MiB.
template <class T>
void multiply_own(const GemmArgs<T>& g, const T* bias);

// By oneDNN, if it was available at build time and the processor has the instructions.

/// True if oneDNN multiplies matrices of this type on this machine: f32 with AVX-512, bf16 with the bf16 instructions
/// of AVX-512 or AMX. Constant during the life of the process. oneDNN's variable ONEDNN_MAX_CPU_ISA limits the
/// instruction set.
TESSERA_API bool has_onednn_product(base::DType dtype);

/// Version and instruction set, such as "oneDNN 2.6.3 (avx512_core_bf16)"; "" if oneDNN is not used.
TESSERA_API std::string onednn_name();

/// C[m, n] = A[m, k] * B[k, n] + bias[n] (+ C if `accumulate`); sums are computed in f32 and rounded once. Strides
/// count elements: `*_row` between rows of the logical matrix, `*_column` between columns; one of the two is 1. `bias`
/// may be null. m, n and k are above 0.
struct OnednnProduct {
  base::DType dtype = base::DType::f32;
  std::size_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::size_t a_row = 0, a_column = 0;
  const void* b = nullptr;
  std::size_t b_row = 0, b_column = 0;
  const void* bias = nullptr;
  void* c = nullptr;
  std::size_t c_row = 0;
  bool accumulate = false;
};

/// Runs only in the calling thread. Requires has_onednn_product(). The bits depend on shapes and strides, not on memory
/// addresses. Throws BackendError with oneDNN's reason.
TESSERA_API void multiply(const OnednnProduct& product);

// By OpenBLAS, loaded at its first use. While it is loaded it maps a buffer for each of its threads, and where the
// system refuses one, it tries again for ever: so its buffers are tried beforehand, and programs without its products
// start.

/// Its name, with the kernels for this processor: "OpenBLAS 0.3.21 (Zen)". This and multiply_by_blas() load it, once in
/// a process; a failure is tried again. They throw SystemError if there is no address space for its buffers,
/// Unsupported if it is not there.
const std::string& blas_name();

/// g's product in the calling thread: the pool has the threads. T: float, double. The strides of g must be given.
template <class T>
void multiply_by_blas(const GemmArgs<T>& g);

}  // namespace tessera::nn::kernels
