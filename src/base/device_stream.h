// A stream of a device whose vendor's libraries want to see the vendor's handle.
#pragma once

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// What a device module's streams derive from, so that a backend of the same vendor can tie its own work to them
/// without the host in between.
class TESSERA_API DeviceStream : public Stream {
 public:
  ~DeviceStream() override;
  /// The vendor's handle; cudaStream_t where device().type is cuda. Owned by this object.
  virtual void* native() const noexcept = 0;

 protected:
  using Stream::Stream;
};

}  // namespace tessera::base
