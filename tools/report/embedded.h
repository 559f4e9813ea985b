// The files of live/ and D3, as constants that the build writes.
#pragma once

#include <string_view>

namespace tessera::tools::report {

extern const std::string_view kD3;  ///< of node-d3: version 5, minified
extern const std::string_view kPageStyle;
extern const std::string_view k_view;
extern const std::string_view k_map;
extern const std::string_view k_frames;
extern const std::string_view k_trace;
extern const std::string_view k_timeline;
extern const std::string_view k_memory;
extern const std::string_view k_bytes;
extern const std::string_view k_why;
extern const std::string_view k_what_if;
extern const std::string_view k_loss;
extern const std::string_view k_main;

}  // namespace tessera::tools::report
