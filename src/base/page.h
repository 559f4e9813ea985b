// The size of the system's memory pages.
#pragma once

#include <cstddef>

#include "tessera/base/export.h"

namespace tessera::base {

/// Bytes of a page: 4096 on x86-64; 4096, 16384 or 65536 on arm64, by the kernel's configuration. Addresses and lengths
/// of mappings, and of what is given back of them, are multiples. Thread-safe.
TESSERA_API std::size_t page_bytes() noexcept;

}  // namespace tessera::base
