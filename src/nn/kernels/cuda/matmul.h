// Products of row-major matrices by cuBLASLt.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/nn/kernels/cuda/matmul_choices.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

// cuBLASLt's functions as a table filled when the library is loaded at run time, so the program also starts on systems
// without it.

#define TESSERA_CUBLAS_LT_FUNCTIONS(F)    \
  F(cublasLtCreate)                       \
  F(cublasLtDestroy)                      \
  F(cublasLtGetStatusString)              \
  F(cublasLtGetVersion)                   \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoCheck)              \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)

struct CublasLt {
#define TESSERA_MEMBER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): declares it
  TESSERA_CUBLAS_LT_FUNCTIONS(TESSERA_MEMBER)
#undef TESSERA_MEMBER
};

/// Loads the library at the first call and never unloads it. Throws Unsupported with the reason.
const CublasLt& cublas_lt();

/// Throws BackendError "cuda: WHAT: the vendor's text".
void check(const CublasLt& api, cublasStatus_t status, const char* what);

/// Operands in 8-bit floating point, of which the library needs the transposes: A as it is, B stored transposed.
struct Fp8Types {
  Fp8Format a = Fp8Format::e4m3, b = Fp8Format::e4m3;
  const float* a_descale = nullptr;  ///< factors of the operands, on the device
  const float* b_descale = nullptr;
  bool fast = false;  ///< sums may keep fewer bits
};

/// A row-major matrix as it is stored.
struct StoredMatrix {
  const void* data = nullptr;
  std::size_t stride = 0;  ///< elements between the starts of two rows; 0: packed
  bool transposed = false;
};

/// C[m, n] = op(A) op(B) + beta C. `bias` (of n elements, added to every row) may be null. A product has a bias or sums
/// of one operand, not both.
struct MatmulArgs {
  DType dtype = DType::f32;       ///< of C and the bias, and of A and B without `fp8`
  const Fp8Types* fp8 = nullptr;  ///< not null: those of A and B
  std::size_t m = 0, n = 0, k = 0;
  StoredMatrix a, b;
  const void* bias = nullptr;
  void* before_gelu = nullptr;  ///< not null: receives op(A) op(B) + bias, and C = its GELU (by tanh)
  void* a_sums = nullptr;       ///< not null: receives the sums of op(A) over k, m elements
  void* b_sums = nullptr;       ///< not null: receives the sums of op(B) over k, n elements
  bool accumulate = false;      ///< beta is 1; the sums are overwritten all the same
  void* c = nullptr;
  std::size_t c_stride = 0;
};

/// Caches the selected algorithms by shape. One per context. Its products share one workspace, so they must run on one
/// stream. With MatmulChoices::tries() the first run of a product tries several algorithms and keeps the fastest.
class CublasLtMatmul {
 public:
  /// `api` must outlive this object. `setting`: of MatmulChoices.
  CublasLtMatmul(const KernelResources& resources, const CublasLt& api, std::string_view setting);
  ~CublasLtMatmul();

  /// Throws Unsupported if the library has no algorithm.
  void run(Stream& stream, const MatmulArgs& product);
  /// True if the library has an algorithm for a product with a bias, and GELU if it is asked for, or with sums.
  bool can(const MatmulArgs& product);
  /// "cuBLASLt 130100", and which choices it follows.
  std::string name() const { return "cuBLASLt " + std::to_string(api_.cublasLtGetVersion()) + choices_.name(); }

 private:
  using Key = MatmulChoices::Key;
  struct AlgorithmChoice;
  AlgorithmChoice& chosen(const MatmulArgs& product);
  void launch(Stream& stream, const MatmulArgs& product, const AlgorithmChoice& choice);
  void try_all(Stream& stream, const MatmulArgs& product, AlgorithmChoice& choice);
  double time_of(Stream& stream, const MatmulArgs& product, const AlgorithmChoice& choice);

  const CublasLt& api_;
  DeviceRuntime& runtime_;
  MemoryPool& memory_;
  const std::shared_ptr<base::Logger> logger_;  ///< may be null
  cublasLtHandle_t handle_ = nullptr;
  Buffer workspace_;
  MatmulChoices choices_;
  std::map<Key, std::unique_ptr<AlgorithmChoice>> chosen_;
  void log_lacking(const MatmulArgs& product);
  bool lacked_epilogue_ = false;  ///< which is logged once
};

}  // namespace tessera::nn::cuda
