// The functions of cuBLASLt as a table that is filled when the library is loaded: the program starts where it is
// missing.
#pragma once

#include <cublasLt.h>

#include <string>

namespace tessera::nn::cuda {

#define TESSERA_CUBLAS_LT_FUNCTIONS(F)    \
  F(cublasLtCreate)                       \
  F(cublasLtDestroy)                      \
  F(cublasLtGetStatusString)              \
  F(cublasLtMatmul)                       \
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
#define TESSERA_MEMBER(name) decltype(&::name) name = nullptr;
  TESSERA_CUBLAS_LT_FUNCTIONS(TESSERA_MEMBER)
#undef TESSERA_MEMBER
};

/// Loads the library the first time; it stays. Throws Unsupported with the reason.
const CublasLt& cublas_lt();

/// Throws BackendError "cuda: WHAT: the vendor's text".
void check(const CublasLt& api, cublasStatus_t status, const char* what);

}  // namespace tessera::nn::cuda
