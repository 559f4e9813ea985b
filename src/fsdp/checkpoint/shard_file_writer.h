// One rank's file of a checkpoint, written by a thread of its own.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "tessera/fsdp/checkpoint/format.h"

namespace tessera::fsdp::checkpoint {

/// Bytes go in from front to back; the thread hashes and writes them, then flushes, then writes the list of what is
/// there. Used by one thread besides its own.
class ShardFileWriter {
 public:
  /// Makes `folder`/rank-R.safetensors. Throws SystemError.
  ShardFileWriter(const std::string& folder, int rank, std::vector<TensorSlice> pieces, std::size_t buffer_bytes);
  ~ShardFileWriter();  ///< what has not been written stays unwritten
  ShardFileWriter(const ShardFileWriter&) = delete;
  ShardFileWriter& operator=(const ShardFileWriter&) = delete;

  static constexpr std::size_t kChunk = std::size_t{4} << 20;
  /// Copies the next bytes, at most kChunk of them. Waits where the buffer is full; after a failure they are dropped.
  void append(const std::byte* data, std::size_t bytes);
  /// The next bytes where they lie: they stay as they are until await() has returned.
  void append_lasting(std::span<const std::byte> bytes);
  void end();  ///< no more
  /// Whether no floating-point number among the bytes was NaN or infinite. When it is done.
  bool finite() const { return finite_; }

  enum class State : std::uint8_t { writing, done, failed };
  State state() const;
  void await();  ///< until it is done or failed
  std::string failure() const;
  const std::string& manifest_hash() const { return manifest_hash_; }  ///< when it is done

 private:
  void run() noexcept;
  void write_all();
  struct Chunk {
    std::vector<std::byte> copy;       ///< empty where the bytes lie elsewhere
    std::span<const std::byte> bytes;  ///< to write
  };
  bool next(Chunk& chunk);
  void write(const std::byte* data, std::size_t bytes);
  void hash(const std::byte* data, std::size_t bytes);
  void check_finite(std::span<const std::byte> bytes);
  void write_manifest();

  const std::string folder_;
  const std::size_t most_chunks_;
  const std::string header_;
  Manifest manifest_;
  std::string manifest_hash_;
  bool finite_ = true;
  std::size_t piece_ = 0;  // of the manifest, that the next bytes belong to
  int file_ = -1;
  std::vector<std::byte> begun_;  ///< of the block that is not full yet

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Chunk> waiting_;
  std::vector<std::vector<std::byte>> free_;  // kept: fresh memory costs more than the copy into it
  std::size_t chunks_ = 0;                    // that there are in all
  bool ended_ = false;
  bool given_up_ = false;
  State state_ = State::writing;
  std::string failure_;
  std::thread thread_;
};

/// Flushes a folder's names to the disk. Throws SystemError.
void flush_folder(const std::string& folder);

}  // namespace tessera::fsdp::checkpoint
