#include "tools/cli/hash.h"

#include <xxhash.h>

#include <memory>

namespace tessera::tools {

std::string hash_parameters(fsdp::Engine& engine) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(state.get());
  engine.state().for_each_parameter([&](const nn::Parameter&, std::span<const float> values) {
    XXH3_128bits_update(state.get(), values.data(), values.size_bytes());
  });
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state.get()));
  std::string text;
  for (const unsigned char byte : bytes.digest) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace tessera::tools
