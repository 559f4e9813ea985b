// Training and evaluation data: memory-mapped token files, and samplers that select the windows of a batch.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/mapped_file.h"
#include "tessera/nn/init.h"
#include "tessera/nn/tensor.h"

namespace tessera::nn {

/// How a file stores tokens.
enum class TokenFormat : std::uint8_t {
  bytes,  ///< text: every byte is a token, so the vocabulary must have at least 256 entries
  u16,    ///< headerless little-endian ids, as nanoGPT writes them
  u32,    ///< the same with 32 bits
  any,    ///< the bytes of a file of any kind; not for users
};
/// "bytes", "u16", "u32". Throws InvalidUsage.
TESSERA_API TokenFormat parse_token_format(std::string_view name);

/// One or more files, read as one sequence of tokens. Thread-safe after construction.
class TESSERA_API TokenDataset {
 public:
  /// Throws InvalidUsage for files that can't be read, are empty, end within a token, are recognized as of another kind
  /// (compressed, a table, an array with a header, ids of another width), or contain an id outside the vocabulary (u16
  /// and u32 files are scanned once).
  TokenDataset(const std::vector<std::string>& paths, TokenFormat format, std::int64_t vocabulary);

  std::int64_t size() const { return ends_.back(); }  ///< size in tokens
  ElementRange all() const { return {0, size()}; }    ///< all tokens, for BatchOptions::range
  /// The first nine tenths (rounded down), for training.
  ElementRange training() const { return {0, size() / 10 * 9 + size() % 10 * 9 / 10}; }
  /// The remaining tokens, for validation.
  ElementRange validation() const { return {training().end, size()}; }
  /// The XXH3 of all bytes, in hexadecimal. Reads the files.
  std::string hash() const;
  /// "a.txt" or "a.txt and 2 more"; used in errors.
  std::string name() const;

  /// Tokens [begin, begin + count) of the sequence.
  void read(std::int64_t begin, std::int64_t count, std::int32_t* out) const;

 private:
  void read_file(std::size_t file, std::int64_t begin, std::int64_t count, std::int32_t* out) const;
  void check_ids(std::size_t file, std::int64_t vocabulary) const;
  const TokenFormat format_;
  std::vector<MappedFile> files_;
  std::vector<std::int64_t> ends_;  // end of each file, in tokens of the sequence
};

/// Two i32 tensors [sequences, positions]; each target is the token after its input.
struct TokenBatch {
  Tensor tokens,  ///< the inputs
      targets;    ///< the token after each input; kIgnoreIndex: none
};

/// The windows that a BatchSampler draws.
struct BatchOptions {
  ElementRange range;             ///< range of the files, such as TokenDataset::training()
  std::int64_t positions = 0;     ///< inputs per sequence, in tokens
  std::int64_t global_batch = 0;  ///< sequences per step over all ranks and microbatches
  std::uint64_t seed = 0;         ///< seed of the random order
};

/// Samples random windows. The window of sequence `index` of step `step` depends only on the seed, the step, the global
/// batch and the index, so rank r of n reads the sequences [r * global_batch / n, (r + 1) * global_batch / n).
class TESSERA_API BatchSampler {
 public:
  /// Throws InvalidUsage if the range is shorter than positions + 1.
  BatchSampler(std::shared_ptr<const TokenDataset> files, const BatchOptions& options);
  /// First token of the window: uniform over all positions at which a window and its last target fit. Steps count from
  /// 1.
  std::int64_t window(std::int64_t step, std::int64_t index) const;
  /// Sequences `indices` of the step's global batch, in newly allocated memory.
  TokenBatch batch(Context& context, std::int64_t step, ElementRange indices) const;

 private:
  std::shared_ptr<const TokenDataset> files_;
  const BatchOptions options_;
};

/// Non-overlapping windows in order. Window w has the inputs [w * positions, (w + 1) * positions) of the range, each of
/// which predicts the next token. A shorter remainder is dropped.
class TESSERA_API SequentialSampler {
 public:
  /// Throws InvalidUsage if the range has no complete window.
  SequentialSampler(std::shared_ptr<const TokenDataset> files, ElementRange range, std::int64_t positions);
  std::int64_t count() const { return (range_.count() - 1) / positions_; }  ///< complete windows in the range
  /// Windows `windows`. Windows at count() and beyond are empty: all their targets are kIgnoreIndex.
  TokenBatch batch(Context& context, ElementRange windows) const;

 private:
  std::shared_ptr<const TokenDataset> files_;
  const ElementRange range_;
  const std::int64_t positions_;
};

}  // namespace tessera::nn
