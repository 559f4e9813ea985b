// Clusters that are known by name.
#pragma once

#include <vector>

#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// All presets, small machines first. Each figure has its reference in ClusterSpec::sources.
std::vector<ClusterSpec> cluster_presets();

}  // namespace tessera::tools
