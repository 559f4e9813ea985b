// CPU offload: shards in host memory, and the copies between them and the device.
//
// Each direction has a copy stream, so that both directions of the link work at the same time. Streams wait for the
// event of the copy that they need; the host does not wait.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "tessera/fsdp/copier.h"
#include "tessera/fsdp/model.h"

namespace tessera::fsdp {

/// One per engine; used by its thread. `runtime` and `copier` outlive it.
///
/// The optimizer state passes through the device in chunks, pipelined: one is uploaded, one updated, one downloaded.
///   begin_chunk(); upload(), exchange() or reserve_download() for each array; wait_for_uploads(); kernels;
///   start_downloads();
class TESSERA_API CpuOffload {
 public:
  CpuOffload(Runtime& runtime, Copier& copier, bool poison);

  /// Waits for all copies. Afterwards no copy uses host memory.
  void finish() noexcept;

  Stream& up() { return *up_; }      ///< to the device
  Stream& down() { return *down_; }  ///< to the host

  /// Zeroed pinned host memory, so that copies are asynchronous, tracked as `offloaded`.
  Buffer allocate(std::size_t bytes);
  void clear(Buffer& memory) const;  ///< zeroes what allocate() returned; no copy may use it

  /// Allocates device memory for chunks of this size.
  void reserve(std::size_t chunk_bytes);
  /// Device bytes that an array of a chunk occupies.
  static std::size_t aligned(std::size_t bytes);

  void begin_chunk();
  /// Uploads an array; returns its device address, from which kernels read.
  void* upload(const void* host, std::size_t bytes);
  /// Returns the device address to which kernels write an array that start_downloads() downloads to `host`.
  void* reserve_download(void* host, std::size_t bytes);
  void* exchange(void* host, std::size_t bytes);  ///< upload() and reserve_download()
  /// Makes the compute stream wait for the uploads of the chunk.
  void wait_for_uploads();
  /// Downloads what the kernels wrote.
  void start_downloads();

 private:
  struct UpdateSlot {
    Buffer memory;
    Event free;  // its results have been downloaded
  };
  struct Download {
    void* host;
    const void* device;
    std::size_t bytes;
  };
  void* suballocate(std::size_t bytes);
  bool has_data() const;

  Runtime& runtime_;
  Copier& copier_;
  const bool poison_;
  const std::unique_ptr<Stream> up_, down_;
  std::array<UpdateSlot, 3> chunks_;
  std::size_t current_ = 0;
  std::size_t used_ = 0;  // bytes of the current chunk
  std::vector<Download> downloads_;
};

}  // namespace tessera::fsdp
