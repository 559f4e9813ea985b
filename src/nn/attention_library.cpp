#include "tessera/nn/attention_library.h"

#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/variables.h"

namespace tessera::nn {
AttentionLibrary parse_attention_library(std::string_view text) {
  if (text == "auto") return AttentionLibrary::automatic;
  if (text == "cudnn") return AttentionLibrary::cudnn;
  if (text == "own") return AttentionLibrary::own;
  throw base::InvalidUsage(std::string(kAttentionVariable.name) + " is '" + std::string(text) +
                           "', needs auto, cudnn or own");
}

AttentionLibrary attention_library_of_environment() {
  return parse_attention_library(base::env_or_default(kAttentionVariable));
}

}  // namespace tessera::nn
