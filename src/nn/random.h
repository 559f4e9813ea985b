// Counter-based random numbers. An element depends only on the seed, the tensor's name and its index, so each rank
// initializes its own shard, and any part of a tensor can be regenerated.
//
// Philox4x32-10: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Normals: the inverse of the
// normal distribution by M. Wichura's rational functions (algorithm AS 241, PPND7, Applied Statistics 37, 1988) with
// this library's own logarithm. They use only + - * / sqrt (no fused operations, no library functions), so the bits are
// the same on every machine and for every vector width and tail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::nn {

/// A 128-bit counter, the low word first.
using PhiloxCounter = std::array<std::uint32_t, 4>;
/// A 64-bit key, the low word first.
using PhiloxKey = std::array<std::uint32_t, 2>;

/// Ten rounds of Philox4x32: 128 random bits from a 128-bit counter and a 64-bit key.
TESSERA_API PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key);

/// 64-bit FNV-1a of a name.
TESSERA_API std::uint64_t hash_name(std::string_view name);

/// A stream of random 32-bit words: word i is word i % 4 of Philox at counter (i / 4, high), under `key`.
struct RandomStream {
  PhiloxKey key{};         ///< selects the stream, with `high`
  std::uint64_t high = 0;  ///< upper half of the counter
};

/// The stream that initializes tensor `name`.
TESSERA_API RandomStream tensor_stream(std::uint64_t seed, std::string_view name);

/// The stream of a dropout module in one step, for one sample of the global batch; element index = word index.
TESSERA_API RandomStream dropout_stream(std::uint64_t seed, std::uint64_t step, std::string_view module,
                                        std::uint64_t sample);

/// Writes words [begin, end) of the stream to out[0 .. end - begin).
TESSERA_API void random_words(const RandomStream& stream, std::uint64_t begin, std::uint64_t end, std::uint32_t* out);

/// out[k] = a normal number (mean 0, standard deviation 1) from word k: |out| < 6.34, symmetric, never infinite.
TESSERA_API void normal_from_words(const std::uint32_t* words, float* out, std::size_t count);

/// Elements [begin, end) of a whole tensor; out[0] is element `begin`. `out` is f32, and rounded once for half
/// precision.
struct RandomRange {
  std::string_view name;    ///< name of the tensor
  std::uint64_t seed = 0;   ///< seed of the model
  std::uint64_t begin = 0;  ///< first element
  std::uint64_t end = 0;    ///< after the last element
};
/// out = mean + std * normal
TESSERA_API void fill_normal(const RandomRange& range, float mean, float std, float* out);
/// The same for f64 elements.
TESSERA_API void fill_normal(const RandomRange& range, double mean, double std, double* out);
/// Elements [begin, end) of a stream. The functions above use tensor_stream(seed, name).
struct StreamRange {
  RandomStream stream;      ///< the stream of words
  std::uint64_t begin = 0;  ///< first element
  std::uint64_t end = 0;    ///< after the last element
};
/// The same for a range of a stream.
TESSERA_API void fill_normal(const StreamRange& range, float mean, float std, float* out);
/// The same for f64 elements.
TESSERA_API void fill_normal(const StreamRange& range, double mean, double std, double* out);
/// out = low + (high - low) * u, u in [0, 1) with 24 bits
TESSERA_API void fill_uniform(const RandomRange& range, float low, float high, float* out);
/// The same for f64 elements.
TESSERA_API void fill_uniform(const RandomRange& range, double low, double high, double* out);
/// The same for a range of a stream.
TESSERA_API void fill_uniform(const StreamRange& range, float low, float high, float* out);
/// The same for f64 elements.
TESSERA_API void fill_uniform(const StreamRange& range, double low, double high, double* out);

}  // namespace tessera::nn
