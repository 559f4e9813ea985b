// cuBLASLt's functions on ordinary memory.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/nn/kernels/cuda/matmul.h"

namespace tessera::nn::test {

/// A column-major matrix as the library gets it.
struct FakeMatrix {
  std::uint64_t rows = 0, columns = 0;
  std::int64_t stride = 0;  ///< elements from a column to the next: the leading dimension
  const void* data = nullptr;
};
struct FakeProduct {
  FakeMatrix a, b, c;
  bool fast = false;  ///< sums of 8-bit operands may keep fewer bits
};

/// What the fake refuses, and what it was asked for. One per process.
struct FakeCublasLt {
  bool no_epilogues = false;          ///< the heuristic finds no product with a bias
  bool no_sums = false;               ///< ... or with the sums of an operand
  bool no_algorithms = false;         ///< ... and no product at all
  std::vector<int> us = {0};          ///< what each algorithm takes at least; negative: it fails when it runs
  std::vector<int> run;               ///< the algorithm of each product
  int failed_choices = 0;             ///< the first algorithms that the heuristic returns have failed
  int choices = 0;                    ///< calls of the heuristic
  std::uint32_t schemes = 0;          ///< for partial sums, of the last one; 0: not set
  const void* vector = nullptr;       ///< the bias or the sums at the last one
  int products = 0;                   ///< products run ...
  int with_epilogue = 0;              ///< ... of them with a bias or with sums
  std::vector<FakeProduct> matrices;  ///< of each product
};
FakeCublasLt& fake_cublas_lt();

/// Products of f32 and bf16, and of 8-bit operands to bf16, with a bias, with GELU, and with the sums of an operand.
const cuda::CublasLt& fake_cublas_lt_api();

}  // namespace tessera::nn::test
