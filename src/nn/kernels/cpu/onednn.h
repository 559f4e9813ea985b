// Matrix products through oneDNN, where it was there at build time and the processor has the instructions.
#pragma once

#include <cstddef>
#include <string>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"

namespace tessera::nn::kernels {

/// Whether oneDNN multiplies matrices of this type here: f32 with AVX-512, bf16 with AVX-512's or AMX's instructions
/// for it. The same for the life of the process. ONEDNN_MAX_CPU_ISA, oneDNN's own variable, limits what it uses.
TESSERA_API bool has_onednn_product(base::DType dtype);

/// Version and instruction set, such as "oneDNN 2.6.3 (avx512_core_bf16)"; "" where it multiplies nothing here.
TESSERA_API std::string onednn_name();

/// C[m, n] = A[m, k] * B[k, n] + bias[n] (+ C where `accumulate`); sums are formed in f32 and rounded once. Strides
/// count elements: `*_row` from one row of the logical matrix to the next, `*_column` from one column to the next; one
/// of the two is 1. `bias` may be null. m, n and k are above 0.
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

/// Runs in the calling thread alone. Only where has_onednn_product(). The bits depend on shapes and strides, not on
/// where the memory lies. Throws BackendError with oneDNN's reason.
TESSERA_API void multiply(const OnednnProduct& product);

}  // namespace tessera::nn::kernels
