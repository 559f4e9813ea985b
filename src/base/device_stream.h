// A device stream that exposes the vendor's handle to the vendor's libraries.
#pragma once

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// The base class of a device module's streams. A backend of the same vendor can order its own work with them without
/// the host. run() calls its argument at once, since that launches work on the device; it must not access device memory
/// itself. Pools reuse memory in the order of the compute stream, so hold() keeps nothing.
class TESSERA_API DeviceStream : public Stream {
 public:
  ~DeviceStream() override;
  /// The vendor's handle; cudaStream_t where device().type is cuda. Owned by this object.
  virtual void* native() const noexcept = 0;
  /// Call this before each piece of work that is appended by the vendor's own calls. Makes the device current for the
  /// calling thread. May make the host wait for a HostEvent, so that the work behind it doesn't fill the device's
  /// queue.
  virtual void prepare_launch() {}
  void hold(std::shared_ptr<const void>) override {}

 protected:
  using Stream::Stream;                                          ///< Stream's constructors
  void enqueue(std::function<void()> work) override { work(); }  ///< runs `work` at once
};

}  // namespace tessera::base
