// Initial values of parameters. They depend only on seed, name and index, so each rank fills its own shard.
#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/nn/types.h"

namespace tessera::nn {

/// How a parameter's initial values are drawn.
struct Init {
  /// The distribution of the values.
  enum class Kind : std::uint8_t {
    zeros,   ///< all 0
    ones,    ///< all 1
    normal,  ///< mean 0, standard deviation Init::deviation
    uniform  ///< uniform numbers in [-Init::deviation, Init::deviation)
  };
  Kind kind = Kind::zeros;  ///< default: zeros
  double deviation = 0.0;   ///< standard deviation; of uniform numbers the exclusive bound of their magnitude
  static constexpr Init zeros() { return {Kind::zeros, 0.0}; }  ///< all 0
  static constexpr Init ones() { return {Kind::ones, 0.0}; }    ///< all 1
  /// Mean 0 and this standard deviation.
  static constexpr Init normal(double deviation) { return {Kind::normal, deviation}; }
  static constexpr Init uniform(double most) { return {Kind::uniform, most}; }  ///< uniform in [-most, most)
};

class Context;

/// Selects initial values: elements `range` of the tensor called `name`.
struct InitialValues {
  Init init;               ///< distribution of the values
  std::string_view name;   ///< canonical name of the tensor; valid during the call
  std::uint64_t seed = 0;  ///< seed of the whole model
  ElementRange range;      ///< range in elements of the whole tensor
};
/// Appends work to the compute stream that writes the values to out[0, range.count()), in device memory. No data is
/// copied from the host. Throws InvalidUsage if the range ends before it begins.
TESSERA_API void fill_initial(Context& context, const InitialValues& values, float* out);
/// The same for elements of any floating type; half-precision elements are the rounded f32 values. Integers become
/// zeros.
TESSERA_API void fill_initial(Context& context, const InitialValues& values, DType dtype, void* out);

/// Fills out[0, range.count()), in host memory, with the initial values of `range` of the tensor called `name`. Throws
/// as above.
TESSERA_API void fill_initial(const Init& init, std::string_view name, std::uint64_t seed, ElementRange range,
                              float* out);

}  // namespace tessera::nn
