// Checks whether dlopen() can open a file.
#pragma once

#include <string>

namespace tessera::base {

/// Why dlopen() can't open the file, or "": it is not a regular file, not an ELF file, or truncated. dlopen() blocks on
/// a FIFO, and maps a truncated file as if it were whole: reading the missing part raises SIGBUS.
std::string shared_object_problem(const std::string& path);

}  // namespace tessera::base
