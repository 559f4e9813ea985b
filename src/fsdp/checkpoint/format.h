// File formats of a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/checkpoint.h"

namespace tessera::fsdp::checkpoint {

inline constexpr std::size_t kBlock = 64 * 1024;  ///< bytes per hash
inline constexpr const char* kPartial = ".partial";
inline constexpr const char* kOld = ".old";  ///< suffix of a step that is being replaced: complete
inline constexpr const char* kIndex = "index.json";

inline constexpr int kBuffer = -3;       ///< TensorSlice::what of a module buffer
inline constexpr int kPluginState = -2;  ///< TensorSlice::what of plug-in state, whose names the plug-ins define

/// A range of a tensor in a rank's file.
struct TensorSlice {
  std::string tensor;
  int what = Checkpoint::kValue;
  ElementRange range;
  DType dtype = DType::f32;
  std::uint64_t offset = 0;  ///< of its first byte in the file
  std::size_t bytes() const { return static_cast<std::size_t>(range.count()) * size_of(dtype); }
};

/// The manifest of one rank's file.
struct Manifest {
  int rank = 0;
  std::uint64_t file_bytes = 0;
  std::vector<std::uint64_t> blocks;  ///< a hash of each kBlock bytes of the file
  std::vector<TensorSlice> slices;
};

struct Index {
  std::uint64_t step = 0;
  std::uint64_t sequence = 0;  ///< numbers the checkpoints of a directory in the order in which they were finished
  std::string strategy;
  Attributes attributes;
  bool finite = true;         ///< no value and no optimizer state is NaN or infinite
  std::optional<bool> apart;  ///< ShardedState::replicas_apart(); absent in checkpoints of older versions
  std::vector<CheckpointTensor> tensors;
  std::vector<CheckpointBuffer> buffers;
  std::vector<std::string> manifests;  ///< by rank: XXH3-128 of the manifest's text
};

std::string step_name(std::uint64_t step);
std::string data_name(int rank);
std::string manifest_name(int rank);

std::string hash128(std::string_view text);  ///< hexadecimal
std::uint64_t hash64(const void* data, std::size_t bytes);

std::string to_text(const Manifest& manifest);
std::string to_text(const Index& index);  ///< ends with a hash of itself
/// Throw InvalidUsage "ORIGIN: PROBLEM". All numbers are in range: elements of shapes and bytes of slices can be
/// counted, slices lie in their file, and names are unique and sorted.
Manifest parse_manifest(const std::string& text, const std::string& origin);
Index parse_index(const std::string& text, const std::string& origin);

/// The header of a safetensors file that contains these slices one after the other; sets their offsets.
std::string lay_out(std::vector<TensorSlice>& slices);

inline constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{64} << 20;
/// Throws InvalidUsage "PATH: REASON", also for a file of more than `limit` bytes.
std::string read_text(const std::string& path, std::uint64_t limit);

/// A complete checkpoint in a directory, and its index.
struct FoundStep {
  std::string path;
  Index index;
};
struct StepList {
  /// The newest complete checkpoint whose values are all finite; null if there is none.
  const FoundStep* newest_finite() const;
  std::vector<FoundStep> whole;      ///< in the order in which they were finished
  std::vector<std::string> damaged;  ///< the problem of each unreadable checkpoint, which no crash leaves behind
};
StepList find_steps(const std::string& directory);

}  // namespace tessera::fsdp::checkpoint
