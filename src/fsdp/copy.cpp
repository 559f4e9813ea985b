#include "tessera/fsdp/copy.h"

#include <cstring>

namespace tessera::fsdp {

void Copier::copy(Stream& stream, void* to, const void* from, std::size_t bytes) {
  copied_bytes_ += bytes;
  stream.run([=] { std::memcpy(to, from, bytes); });
}

}  // namespace tessera::fsdp
