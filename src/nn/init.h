// Initial values of parameters: a function of seed, name and index only, so that a shard is filled where it lives.
#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/nn/types.h"

namespace tessera::nn {

struct Init {
  enum class Kind : std::uint8_t { zeros, ones, normal, uniform };
  Kind kind = Kind::zeros;
  double deviation = 0.0;  ///< of uniform numbers: the most, which they stay below on both sides of zero
  static constexpr Init zeros() { return {Kind::zeros, 0.0}; }
  static constexpr Init ones() { return {Kind::ones, 0.0}; }
  static constexpr Init normal(double deviation) { return {Kind::normal, deviation}; }
  static constexpr Init uniform(double most) { return {Kind::uniform, most}; }
};

/// Elements [begin, end) of a tensor.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

class Context;

/// Whose initial values: elements `range` of the tensor called `name`.
struct InitialValues {
  Init init;
  std::string_view name;
  std::uint64_t seed = 0;
  ElementRange range;
};
/// Appends to the compute stream: out[0, range.count()), in the device's memory, gets them. No data comes from the
/// host.
TESSERA_API void fill_initial(Context& context, const InitialValues& values, float* out);
/// The same for elements of any floating type, 16-bit ones being the f32 values, rounded; integers are zeros.
TESSERA_API void fill_initial(Context& context, const InitialValues& values, DType dtype, void* out);

/// Fills out[0, range.count()), in the host's memory, with the initial values of `range` of the tensor called `name`.
TESSERA_API void fill_initial(const Init& init, std::string_view name, std::uint64_t seed, ElementRange range,
                              float* out);

}  // namespace tessera::nn
