#include "tessera/base/page.h"

#include <unistd.h>

namespace tessera::base {

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace tessera::base
