// What a profiler that is attached to the program shows as ranges of its threads.
#pragma once

#include <string_view>

namespace tessera::base::cuda {

/// Ranges of the calling thread, named "WHAT UNIT"; they nest. Where no profiler is attached each is one comparison.
void begin_range(std::string_view what, std::string_view unit) noexcept;
void end_range() noexcept;

}  // namespace tessera::base::cuda
