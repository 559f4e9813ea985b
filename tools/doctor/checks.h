// What goes wrong most on a host, looked up or tried out. Each finding has its remedy.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

struct Finding {
  std::string level;  ///< "ok"; "note": may be meant; "warning": slower, or fails in some runs; "error": does not work
  std::string subject;  ///< what was checked, one word or two
  std::string found;
  std::string remedy = {};  ///< "" if there is nothing to do
};

/// {"level": .., "subject": .., "found": .., "remedy": ..}
nlohmann::ordered_json finding_json(const Finding& finding);

/// Checks this host in about five seconds: cores, memory, limits, what ranks share, names and interfaces, and every
/// backend with a world of two ranks. `several`: its ranks will talk to other hosts. Throws SystemError.
std::vector<Finding> check_host(bool several);

}  // namespace tessera::tools
