// tessera report --postmortem: what the ranks of a run did last, and where they diverged.
#pragma once

#include <string>

namespace tessera::tools {

/// Prints the postmortem of the newest run that recorded in `directory`, and writes it as JSON to `json` unless that is
/// empty. Throws InvalidUsage if the directory has no complete file of the flight recorder.
void print_postmortem(const std::string& directory, const std::string& json);

}  // namespace tessera::tools
