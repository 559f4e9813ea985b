// The files of live/, D3 and the presets of clusters, as constants that the build writes.
#pragma once

#include <string_view>

namespace tessera::tools::pages {

extern const std::string_view kD3;       ///< of node-d3: version 5, minified
extern const std::string_view kPalette;  ///< colors of the light and dark schemes: --c0 to --c7 distinguish items
extern const std::string_view kPageStyle;
extern const std::string_view kClusters;    ///< plan/clusters.json
extern const std::string_view kPageScript;  ///< the files of live/, which share their names

}  // namespace tessera::tools::pages
