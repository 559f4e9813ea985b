// Elementary functions with the same bits on every processor. Those of the C library change with its version and with
// the processor's instructions.
#pragma once

#include <cstdint>

#include "tessera/base/export.h"

namespace tessera::base::portable {

/// The natural logarithm, to 1 ulp; -infinity at 0, NaN below.
TESSERA_API double log(double x);

/// e^x, to 1 ulp; 0 below -708 (no subnormals), infinity above 709.78.
TESSERA_API double exp(double x);

/// base^exponent for base > 0, to a relative error of (1 + |exponent * log(base)|) * 2^-52.
TESSERA_API double power(double base, double exponent);

/// base^exponent by products; the relative error is at most exponent * 2^-53.
TESSERA_API double power(double base, std::uint64_t exponent);

/// The real cube root, to 2 ulp.
TESSERA_API double cube_root(double x);

/// The sine, to 2 ulp for |x| < 2^31 (in radians); NaN for infinities.
TESSERA_API double sine(double x);
/// The cosine, with the accuracy of sine().
TESSERA_API double cosine(double x);

}  // namespace tessera::base::portable
