// Matrix products by oneDNN, if it was available at build time and the processor has the instructions.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"

namespace tessera::nn::kernels {

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

}  // namespace tessera::nn::kernels
