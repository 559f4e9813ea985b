// The library that computes attention on a GPU.
#pragma once

#include <string_view>

#include "tessera/base/export.h"

namespace tessera::nn {

/// Selects what computes attention on CUDA.
enum class AttentionLibrary : unsigned char {
  automatic,  ///< cuDNN where it is installed and has a deterministic plan, else this library's kernels
  cudnn,      ///< the same as automatic, but an error where cuDNN is missing or rejects a call that is passed to it
  own         ///< this library's kernels
};

/// Parses `auto`, `cudnn` or `own`. Throws InvalidUsage for another text.
TESSERA_API AttentionLibrary parse_attention_library(std::string_view text);

/// TESSERA_ATTENTION; throws as parse_attention_library().
TESSERA_API AttentionLibrary attention_library_of_environment();

}  // namespace tessera::nn
