// The attention of builds without cuDNN's headers.
#include "tessera/base/error.h"
#include "tessera/nn/kernels/cuda/library_tables.h"

namespace tessera::nn::cuda {

std::unique_ptr<AttentionTable> make_attention(const KernelResources&, AttentionLibrary library) {
  if (library == AttentionLibrary::cudnn)
    throw base::Unsupported(
        "attention: TESSERA_ATTENTION is cudnn, but this library was built without cuDNN's headers");
  return nullptr;
}

std::string describe_attention() noexcept {
  return "attention by " + std::string(kOwnAttention) + ": built without cuDNN's headers";
}

}  // namespace tessera::nn::cuda
