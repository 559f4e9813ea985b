// Ranges of the program's threads in an attached profiler.
#pragma once

#include <string_view>

namespace tessera::base::cuda {

/// Begins a range of the calling thread, named "WHAT UNIT"; ranges nest. Without a profiler each call is one
/// comparison.
void begin_range(std::string_view what, std::string_view unit) noexcept;
void end_range() noexcept;

}  // namespace tessera::base::cuda
