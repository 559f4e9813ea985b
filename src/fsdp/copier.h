// The only place in fsdp that copies bytes between buffers, so that copies can be counted. The hot path makes none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/base/device_runtime.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// One per engine; used by its thread.
class TESSERA_API Copier {
 public:
  explicit Copier(base::DeviceRuntime& runtime) : runtime_(runtime) {}  ///< `runtime` outlives the copier
  /// Appends a copy within device memory to `stream`.
  void copy(Stream& stream, void* to, const void* from, std::size_t bytes);
  std::uint64_t copied_bytes() const { return copied_bytes_; }  ///< bytes copied by copy(), cumulative

  /// Appends a copy between a shard in host memory and the device. These copies are counted separately, because they
  /// are no avoidable duplicates: an offloaded shard must cross the link, as an all-gathered one must cross the
  /// network.
  void upload(Stream& stream, void* device, const void* host, std::size_t bytes);
  /// The opposite direction of upload().
  void download(Stream& stream, void* host, const void* device, std::size_t bytes);
  std::uint64_t uploaded_bytes() const { return uploaded_bytes_; }      ///< bytes uploaded by upload(), cumulative
  std::uint64_t downloaded_bytes() const { return downloaded_bytes_; }  ///< bytes downloaded by download(), cumulative

 private:
  base::DeviceRuntime& runtime_;
  std::uint64_t copied_bytes_ = 0;
  std::uint64_t uploaded_bytes_ = 0;
  std::uint64_t downloaded_bytes_ = 0;
};

}  // namespace tessera::fsdp
