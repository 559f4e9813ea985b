// What the steps of a comparison would take over other links, on other ranks and with other batches: schedules that a
// page replays.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/json/json_reader.h"
#include "tools/cli/quantities.h"

namespace tessera::tools {

struct WhatIf {
  struct Run {
    std::string name, strategy;
    double measured_ms = 0;
    double simulated_ms = 0;           ///< in the setting of the run; 0 if it is left out
    nlohmann::ordered_json schedules;  ///< by ranks and hosts, for the script of the page
    bool memory_known = true;          ///< false: it does not grow in proportion to the tokens
    std::string left_out;              ///< why there are none; "" if there are
  };
  /// Where the sliders begin.
  struct Setting {
    LinkSpec link;   ///< between all ranks, or between hosts
    LinkSpec intra;  ///< inside hosts, if there are several
    int ranks = 1, hosts = 1;
    std::int64_t sequences = 1;  ///< of a rank's microbatch
  };
  std::string machine;         ///< what a rank computes, as plan --machine takes it: the compute that was measured
  double flops = 0;            ///< of that machine
  double parameter_bytes = 0;  ///< of one that is unsharded; 0 if plug-ins compress it
  bool link_given = true;      ///< with --link; else the setting's link is plan's
  Setting setting;
  std::int64_t seq_len = 1, microbatches = 1, most_sequences = 1;
  std::vector<std::string> command;  ///< of plan, without what the sliders choose; empty if it can't do the same
  std::vector<Run> runs;
};

nlohmann::ordered_json to_json(const WhatIf& what_if);
/// Reads what to_json() wrote. Throws InvalidUsage.
WhatIf parse_what_if(const base::JsonReader& json);
nlohmann::ordered_json link_json(const LinkSpec& link);
LinkSpec link_at(const base::JsonReader& json);  ///< reads what link_json() wrote. Throws InvalidUsage

}  // namespace tessera::tools
