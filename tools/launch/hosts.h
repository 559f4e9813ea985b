// The hosts of `tessera run --hosts` and `--hostfile`, and which ranks each gets.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// A host and its number of ranks.
struct HostSlots {
  std::string name;  ///< as ssh takes it
  int slots = 0;     ///< 0: not given
};

/// Parses "a,b:4,user@c". Throws InvalidUsage.
std::vector<HostSlots> parse_hosts(const std::string& list);

/// Reads a file with a host a line: `host`, `host:slots` or `host slots=N`; # begins a comment. Throws InvalidUsage.
std::vector<HostSlots> read_hostfile(const std::string& path);

/// Gives the ranks to the hosts in their order; slots of a host that is named twice are added. Without `ranks` every
/// slot gets one, and a host without slots counts as one slot. With `ranks`, hosts get equal parts if none has slots;
/// hosts without ranks are left out. Throws InvalidUsage if there are fewer slots than ranks.
std::vector<HostSlots> place_ranks(const std::vector<HostSlots>& hosts, const std::optional<int>& ranks);

}  // namespace tessera::tools
