// The files of a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/checkpoint.h"

namespace tessera::fsdp::checkpoint {

inline constexpr std::size_t kBlock = 64 * 1024;  ///< bytes that one hash covers
inline constexpr const char* kPartial = ".partial";
inline constexpr const char* kOld = ".old";  ///< of a step that is being replaced: whole
inline constexpr const char* kIndex = "index.json";

inline constexpr int kBuffer = -3;  ///< TensorSlice::what of a module's buffer
inline constexpr int kPluginState =
    -2;  ///< TensorSlice::what of what the rank's collective plug-ins carry; the name is theirs

/// A range of a tensor in a rank's file.
struct TensorSlice {
  std::string tensor;
  int what = Checkpoint::kValue;
  nn::ElementRange range;
  DType dtype = DType::f32;
  std::uint64_t offset = 0;  ///< of its bytes in the file
  std::size_t bytes() const { return static_cast<std::size_t>(range.count()) * size_of(dtype); }
};

/// What one rank wrote.
struct Manifest {
  int rank = 0;
  std::uint64_t file_bytes = 0;
  std::vector<std::uint64_t> blocks;  ///< a hash of each kBlock bytes of the file
  std::vector<TensorSlice> pieces;
};

struct Index {
  std::uint64_t step = 0;
  std::uint64_t sequence = 0;  ///< counts the checkpoints of a folder in the order in which they were finished
  std::string strategy;
  Attributes attributes;
  bool finite = true;  ///< no value and no state of the optimizer is NaN or infinite
  std::optional<bool> apart;  ///< Engine::replicas_apart(); unknown in checkpoints of older versions
  std::vector<CheckpointTensor> tensors;
  std::vector<CheckpointBuffer> buffers;
  std::vector<std::string> manifests;  ///< by rank: the XXH3-128 of its list's text
};

std::string step_name(std::uint64_t step);
std::string data_name(int rank);
std::string manifest_name(int rank);

std::string hash128(std::string_view text);  ///< hexadecimal
std::uint64_t hash64(const void* data, std::size_t bytes);

std::string to_text(const Manifest& manifest);
std::string to_text(const Index& index);  ///< ends with a hash of itself
/// Throw InvalidUsage "ORIGIN: what".
Manifest parse_manifest(const std::string& text, const std::string& origin);
Index parse_index(const std::string& text, const std::string& origin);

/// The header of a safetensors file with these pieces one after the other; sets their offsets.
std::string lay_out(std::vector<TensorSlice>& pieces);

/// Throws InvalidUsage "PATH: REASON".
std::string read_text(const std::string& path);

/// A folder of `folder` that is whole, and its index.
struct FoundStep {
  std::string path;
  Index index;
};
struct StepList {
  /// The newest whose values are all finite; null where there is none.
  const FoundStep* newest_finite() const;
  std::vector<FoundStep> whole;      ///< the one that was finished first before the others
  std::vector<std::string> damaged;  ///< what is wrong with each that can't be read, which no crash leaves behind
};
StepList find_steps(const std::string& folder);

}  // namespace tessera::fsdp::checkpoint
