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
#include "tessera/fsdp/types.h"
#include "tessera/nn/context.h"

namespace tessera::fsdp {

/// One per engine; used by its thread. `context` and `copier` outlive it.
///
/// The optimizer state passes through the device in pieces, pipelined: one is uploaded, one updated, one downloaded.
///   begin_piece(); bring(), exchange(), place() for each array; arrive(); kernels; start_write_back();
class TESSERA_API CpuOffload {
 public:
  CpuOffload(nn::Context& context, Copier& copier, bool poison);
  CpuOffload(const CpuOffload&) = delete;
  CpuOffload& operator=(const CpuOffload&) = delete;

  /// Waits for all copies. Afterwards no copy uses host memory.
  void finish() noexcept;

  Stream& up() { return *up_; }      ///< to the device
  Stream& down() { return *down_; }  ///< to the host

  /// Zeroed pinned host memory, so that copies are asynchronous, tracked as `offloaded`.
  Buffer allocate(std::size_t bytes);

  /// Allocates device memory for pieces of this size.
  void reserve(std::size_t piece_bytes);
  /// Device bytes that an array of a piece occupies.
  static std::size_t room_of(std::size_t bytes);

  void begin_piece();
  /// Uploads an array; returns its device address, from which kernels read.
  void* bring(const void* host, std::size_t bytes);
  /// Returns the device address to which kernels write an array that start_write_back() downloads to `host`.
  void* place(void* host, std::size_t bytes);
  void* exchange(void* host, std::size_t bytes);  ///< bring() and place()
  /// Kernels appended from here on start after the piece's uploads.
  void arrive();
  /// Downloads what the kernels wrote.
  void start_write_back();

 private:
  struct UpdateSlot {
    Buffer room;
    Event free;  // its results have been downloaded
  };
  struct WriteBack {
    void* host;
    const void* device;
    std::size_t bytes;
  };
  void* room_for(std::size_t bytes);

  nn::Context& context_;
  Copier& copier_;
  const bool poison_;
  const std::unique_ptr<Stream> up_, down_;
  std::array<UpdateSlot, 3> pieces_;
  std::size_t current_ = 0;
  std::size_t used_ = 0;  // bytes of the current piece
  std::vector<WriteBack> returns_;
};

}  // namespace tessera::fsdp
