// Describes the machine of a measurement.
#pragma once

#include <string>

namespace tessera::tools {

/// One line: processor, cores that this process may use, memory, system.
std::string machine_line();

}  // namespace tessera::tools
