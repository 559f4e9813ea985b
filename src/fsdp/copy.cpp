#include "tessera/fsdp/copy.h"

namespace tessera::fsdp {

void Copier::copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  copied_bytes_ += bytes;
  runtime_.copy(stream, base::CopyDirection::device_to_device, to, from, bytes);
}

}  // namespace tessera::fsdp
