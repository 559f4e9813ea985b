// The files of live/ and D3, as constants that the build writes.
#pragma once

#include <string_view>

namespace tessera::tools::report {

extern const std::string_view kD3;  ///< of node-d3: version 5, minified
extern const std::string_view kPageStyle;
extern const std::string_view kViewScript;
extern const std::string_view kMapScript;
extern const std::string_view kFramesScript;
extern const std::string_view kTraceScript;
extern const std::string_view kTimelineScript;
extern const std::string_view kMemoryScript;
extern const std::string_view kBytesScript;
extern const std::string_view kWhyScript;
extern const std::string_view kWhatIfScript;
extern const std::string_view kLossScript;
extern const std::string_view kMainScript;

}  // namespace tessera::tools::report
