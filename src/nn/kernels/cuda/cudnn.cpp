#include "tessera/nn/kernels/cuda/cudnn.h"

#include <array>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/vendor_library.h"

namespace tessera::nn::cuda {
namespace {

struct Loaded {
  Cudnn api;
  std::string problem;
};

Loaded load() {
  Loaded loaded;
  kernels::VendorLibrary library("libcudnn.so." + std::to_string(CUDNN_MAJOR), "cuDNN");
#define TESSERA_FIND(function) library.find(#function, loaded.api.function);
  TESSERA_CUDNN_FUNCTIONS(TESSERA_FIND)
#undef TESSERA_FIND
  loaded.problem = library.problem();
  return loaded;
}

}  // namespace

const Cudnn& cudnn() {
  static const Loaded loaded = load();  // loaded once per process, as by dlopen() itself
  if (!loaded.problem.empty()) throw base::Unsupported("cuda: no cuDNN: " + loaded.problem);
  return loaded.api;
}

void require_version(const Cudnn& api) {
  const std::size_t version = api.cudnnGetVersion();
  if (version < kCudnnMinVersion || version / 10000 != CUDNN_MAJOR)
    throw base::Unsupported("cuda: cuDNN is version " + version_text(version) + ", needs " +
                            version_text(kCudnnMinVersion) + " or newer of its generation");
}

std::string version_text(std::size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

void check(const Cudnn& api, cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 512> reason{};
  api.cudnnGetLastErrorString(reason.data(), reason.size() - 1);
  const std::string_view line = std::string_view(reason.data()).substr(0, std::string_view(reason.data()).find('\n'));
  throw base::BackendError(std::string("cuda: ") + what + ": " + api.cudnnGetErrorString(status) +
                           (line.empty() ? "" : " (" + std::string(line) + ")"));
}

}  // namespace tessera::nn::cuda
