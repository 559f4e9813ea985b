// A stream of a device whose vendor's libraries want to see the vendor's handle.
#pragma once

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// What a device module's streams derive from, so that a backend of the same vendor can tie its own work to them
/// without the host in between. What is given to run() launches work on the device, so it is called at once, and may
/// not touch the device's memory itself. Pools hand memory on in the order of the compute stream, so nothing is held.
class TESSERA_API DeviceStream : public Stream {
 public:
  ~DeviceStream() override;
  /// The vendor's handle; cudaStream_t where device().type is cuda. Owned by this object.
  virtual void* native() const noexcept = 0;
  void hold(std::shared_ptr<const void>) override {}

 protected:
  using Stream::Stream;
  void enqueue(std::function<void()> work) override { work(); }
};

}  // namespace tessera::base
