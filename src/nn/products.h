// What multiplies matrices on the host.
#pragma once

#include <string_view>

#include "tessera/base/export.h"

namespace tessera::nn {

/// Selects what multiplies matrices on the host. GPUs always use cuBLASLt.
enum class Products : unsigned char {
  library,  ///< the fastest library: oneDNN where the processor has AVX-512, else OpenBLAS; bits differ by processor
  own       ///< this project's code: the same bits on every processor, see docs/products.md
};

/// Parses `library` or `own`. Throws InvalidUsage for another text.
TESSERA_API Products parse_products(std::string_view text);

/// "library" or "own".
TESSERA_API std::string_view name_of(Products products);

/// TESSERA_PRODUCTS, or `otherwise` if it is not set; throws as parse_products().
TESSERA_API Products products_of_environment(Products otherwise = Products::library);

}  // namespace tessera::nn
