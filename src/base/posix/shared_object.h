// Whether a file can be given to dlopen().
#pragma once

#include <string>

namespace tessera::base {

/// Why not, or "": that it is no regular file, no ELF file, or cut short. dlopen() waits for a FIFO's other end, and
/// maps a file that was cut short as if it were whole: who then reads what is missing dies of SIGBUS.
std::string shared_object_problem(const std::string& path);

}  // namespace tessera::base
