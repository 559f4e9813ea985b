// The fingerprint of a model's parameters.
#pragma once

#include <string>

#include "tessera/fsdp/engine.h"

namespace tessera::tools {

/// XXH3-128, in hexadecimal, over the f32 values of every parameter without padding, by canonical name in byte order,
/// with tied tensors once. Collective; the same on every rank.
std::string hash_parameters(fsdp::Engine& engine);

}  // namespace tessera::tools
