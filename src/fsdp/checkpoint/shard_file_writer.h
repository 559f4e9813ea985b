// Writer of one rank's checkpoint file, with a thread of its own; and the lock of a directory of checkpoints.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/file.h"
#include "tessera/fsdp/checkpoint/format.h"

namespace tessera::fsdp::checkpoint {

/// Locks a checkpoint directory for one run: an exclusive flock(2) of the file `.lock` in it, whose text names the
/// holder. The kernel releases the lock when the process ends, for whatever reason. On a file system without locks it
/// has no effect.
class DirectoryLock {
 public:
  /// Creates the directory if it does not exist. Waits up to `patience` for the lock, because a killed process may take
  /// a moment to exit. Throws InvalidUsage if another run still holds the lock, SystemError if the file cannot be
  /// opened.
  DirectoryLock(const std::string& directory, std::chrono::milliseconds patience);

 private:
  base::UniqueFd file_;
};

/// Accepts the file's bytes in order. The thread hashes and writes them, then flushes the file, then writes its
/// manifest. Used by one thread besides its own.
class ShardFileWriter {
 public:
  /// Creates `directory`/rank-R.safetensors. Throws SystemError.
  ShardFileWriter(const std::string& directory, int rank, std::vector<TensorSlice> slices, std::size_t buffer_bytes);
  ~ShardFileWriter();  ///< discards what has not been written

  static constexpr std::size_t kChunk = std::size_t{4} << 20;
  /// Copies the next bytes, at most kChunk of them. Waits while the buffer is full; after a failure the bytes are
  /// dropped.
  void append(const std::byte* data, std::size_t bytes);
  /// Appends the next bytes without a copy: they must not change until await() has returned.
  void append_lasting(std::span<const std::byte> bytes);
  void end();  ///< no more bytes follow
  /// Whether all floating-point numbers among the bytes are finite. Valid once the state is `done`.
  bool finite() const { return finite_; }

  enum class State : std::uint8_t { writing, done, failed };
  State state() const;
  void await();  ///< waits until the state is `done` or `failed`
  std::string failure() const;
  const std::string& manifest_hash() const { return manifest_hash_; }  ///< valid once the state is `done`

 private:
  void run() noexcept;
  void write_all();
  struct Chunk {
    std::vector<std::byte> copy;       ///< empty if `bytes` refers to the caller's memory
    std::span<const std::byte> bytes;  ///< to write
  };
  bool next(Chunk& chunk);
  void write(const std::byte* data, std::size_t bytes);
  void hash(const std::byte* data, std::size_t bytes);
  void check_finite(std::span<const std::byte> bytes);
  void write_manifest();

  const std::string directory_;
  const std::size_t most_chunks_;
  const std::string header_;
  Manifest manifest_;
  std::string manifest_hash_;
  bool finite_ = true;
  std::size_t slice_ = 0;  // index of the manifest's slice to which the next bytes belong
  base::UniqueFd file_;
  std::vector<std::byte> begun_;  ///< of the incomplete block

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chunk> waiting_;
  std::vector<std::vector<std::byte>> free_;  // reused: fresh memory costs more than the copy into it
  std::size_t chunks_ = 0;                    // allocated in total
  bool ended_ = false;
  bool cancelled_ = false;
  State state_ = State::writing;
  std::string failure_;
  std::thread thread_;
};

/// Flushes a directory's entries to disk. Throws SystemError.
void flush_directory(const std::string& directory);

}  // namespace tessera::fsdp::checkpoint
