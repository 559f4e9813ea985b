// The attention of builds with cuDNN's headers.
#include "tessera/base/error.h"
#include "tessera/nn/kernels/cuda/cudnn_attention.h"

namespace tessera::nn::cuda {

std::unique_ptr<AttentionTable> make_attention(const KernelResources& resources, AttentionLibrary library) {
  if (library == AttentionLibrary::own) return nullptr;
  return make_cudnn_attention(resources, library, &cudnn);
}

std::string describe_attention() noexcept {
  try {
    if (attention_library_of_environment() == AttentionLibrary::own)
      return "attention by " + std::string(kOwnAttention) + ", as TESSERA_ATTENTION demands";
    const Cudnn& api = cudnn();
    require_version(api);
    return "attention by cuDNN " + version_text(api.cudnnGetVersion());
  } catch (const base::Error& error) {
    return "attention by " + std::string(kOwnAttention) + ": " + error.what();
  }
}

}  // namespace tessera::nn::cuda
