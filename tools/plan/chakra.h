// A simulated step as MLCommons Chakra execution traces: one file per rank of the world.
#pragma once

#include <string>

#include "tools/plan/step_graph.h"

namespace tessera::tools {

/// Creates the folder if it is not there. Throws InvalidUsage if it can't be written or has files. "" is no folder.
void check_chakra_folder(const std::string& folder);

/// Writes `folder`/rank.R.et for every rank R of a world of equal ranks: GlobalMetadata and the nodes, each after its
/// length as a varint. Also comm_groups.json, the members of the groups by number, which ASTRA-sim reads. Holds one
/// file at a time. Throws SystemError.
void write_chakra(const StepGraph& step, int ranks, const std::string& folder);

}  // namespace tessera::tools
