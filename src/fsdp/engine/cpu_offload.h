// Shards in the host's memory, and their way to the device and back.
//
// Two streams carry the copies, one each way, so that both directions of the link work at the same time. Whoever needs
// what a copy brings waits for an event on a stream; the host waits for nothing.
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
/// The optimizer's state passes through the device in pieces, a few at a time: one comes, one is updated, one goes.
///   begin_piece(); bring(), exchange(), place() for each array; arrive(); kernels; start_write_back();
class TESSERA_API CpuOffload {
 public:
  CpuOffload(nn::Context& context, Copier& copier, bool poison);
  CpuOffload(const CpuOffload&) = delete;
  CpuOffload& operator=(const CpuOffload&) = delete;

  /// Waits for all copies. After it the host's memory is in nobody's use.
  void finish() noexcept;

  Stream& up() { return *up_; }      ///< to the device
  Stream& down() { return *down_; }  ///< to the host

  /// Zeroed memory of the host that copies don't wait for, booked as `offloaded`.
  Buffer allocate(std::size_t bytes);

  /// Memory of the device for pieces of this size.
  void reserve(std::size_t piece_bytes);
  /// Device bytes that an array of a piece takes.
  static std::size_t room_of(std::size_t bytes);

  void begin_piece();
  /// Where on the device the kernels find what lies at `host`.
  void* bring(const void* host, std::size_t bytes);
  /// Where they write what comes to `host`.
  void* place(void* host, std::size_t bytes);
  void* exchange(void* host, std::size_t bytes);  ///< both
  /// Kernels that are appended from here on find everything in its place.
  void arrive();
  /// What they wrote goes to the host.
  void start_write_back();

 private:
  struct UpdateSlot {
    Buffer room;
    Event free;  // its results have left
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
