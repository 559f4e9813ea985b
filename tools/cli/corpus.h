// The default training text.
#pragma once

#include <string>

namespace tessera::tools {

/// The corpus that scripts/setup unpacked: beside the build (`<folder of the program>/../corpus/gcide.txt`), else
/// installed (`/usr/share/tessera/corpus/gcide.txt`). Throws InvalidUsage that explains how to get it.
std::string default_corpus();

}  // namespace tessera::tools
