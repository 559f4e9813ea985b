#include "tessera/nn/kernels/cuda/cublas_lt.h"

#include <dlfcn.h>

#include "tessera/base/error.h"

namespace tessera::nn::cuda {
namespace {

struct Loaded {
  CublasLt api;
  std::string problem;
};

template <class Function>
void find(void* library, const char* name, Function& function, std::string& problem) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && problem.empty()) problem = std::string("cuBLASLt has no ") + name;
}

Loaded load() {
  Loaded loaded;
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = ::dlerror();
    loaded.problem = text != nullptr ? text : name + " can't be loaded";
    return loaded;
  }
#define TESSERA_FIND(function) find(library, #function, loaded.api.function, loaded.problem);
  TESSERA_CUBLAS_LT_FUNCTIONS(TESSERA_FIND)
#undef TESSERA_FIND
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
