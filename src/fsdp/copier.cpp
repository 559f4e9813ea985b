#include "tessera/fsdp/copier.h"

namespace tessera::fsdp {

void Copier::copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  copied_bytes_ += bytes;
  runtime_.copy(stream, base::CopyDirection::device_to_device, to, from, bytes);
}

void Copier::upload(Stream& stream, void* device, const void* host, std::size_t bytes) {
  uploaded_bytes_ += bytes;
  runtime_.copy(stream, base::CopyDirection::host_to_device, device, host, bytes);
}

void Copier::download(Stream& stream, void* host, const void* device, std::size_t bytes) {
  downloaded_bytes_ += bytes;
  runtime_.copy(stream, base::CopyDirection::device_to_host, host, device, bytes);
}

}  // namespace tessera::fsdp
