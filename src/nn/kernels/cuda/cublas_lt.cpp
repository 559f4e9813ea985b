#include "tessera/nn/kernels/cuda/cublas_lt.h"

#include "tessera/base/error.h"
#include "tessera/nn/kernels/vendor_library.h"

namespace tessera::nn::cuda {
namespace {

struct Loaded {
  CublasLt api;
  std::string problem;
};

Loaded load() {
  Loaded loaded;
  kernels::VendorLibrary library("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), "cuBLASLt");
#define TESSERA_FIND(function) library.find(#function, loaded.api.function);
  TESSERA_CUBLAS_LT_FUNCTIONS(TESSERA_FIND)
#undef TESSERA_FIND
  loaded.problem = library.problem();
  return loaded;
}

}  // namespace

const CublasLt& cublas_lt() {
  static const Loaded loaded = load();  // loaded once per process, as by dlopen() itself
  if (!loaded.problem.empty()) throw base::Unsupported("cuda: no matrix products: " + loaded.problem);
  return loaded.api;
}

void check(const CublasLt& api, cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw base::BackendError(std::string("cuda: ") + what + ": " + api.cublasLtGetStatusString(status));
}

}  // namespace tessera::nn::cuda
