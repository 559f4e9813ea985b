#include "tessera/nn/attention_library.h"

#include <array>
#include <string>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

constexpr base::EnvVariable kAttention{"TESSERA_ATTENTION", "auto",
                                       "16-bit attention on CUDA: auto (cuDNN where it is installed), cudnn (an error "
                                       "without it) or own (this library's)"};

}  // namespace

AttentionLibrary parse_attention_library(std::string_view text) {
  if (text == "auto") return AttentionLibrary::automatic;
  if (text == "cudnn") return AttentionLibrary::cudnn;
  if (text == "own") return AttentionLibrary::own;
  throw base::InvalidUsage(std::string(kAttention.name) + " is '" + std::string(text) + "', needs auto, cudnn or own");
}

AttentionLibrary attention_library_of_environment() {
  return parse_attention_library(base::env_or_default(kAttention));
}

std::span<const base::EnvVariable> variables() {
  static constexpr std::array kAll{kAttention};
  return kAll;
}

}  // namespace tessera::nn
