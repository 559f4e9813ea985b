// cuBLASLt's functions as a table filled when the library is loaded at run time, so the program also starts on systems
// without it.
#pragma once

#include <cublasLt.h>

namespace tessera::nn::cuda {

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

}  // namespace tessera::nn::cuda
