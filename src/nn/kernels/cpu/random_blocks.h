// Vectorized implementation of random.h.
#pragma once

#include <cstdint>

#include "tessera/nn/random.h"

namespace tessera::nn {

/// Words of Philox blocks [first, first + count): out[4 * count].
void philox_blocks(const RandomStream& stream, std::uint64_t first, std::uint64_t count, std::uint32_t* out);

}  // namespace tessera::nn
