// Finds the first call of a run on which its ranks diverged.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "tools/report/flight_log.h"

namespace tessera::tools {

struct FirstDivergence {
  enum class Kind : std::uint8_t {
    never_called,  ///< ranks have not made a call that others made
    differs,       ///< ranks made different calls as the same one of a communicator
    no_file,       ///< others wait for ranks without a file
    died_in,       ///< all have made the call, it failed on others, and these ranks did not live to see that
  };
  Kind kind = Kind::never_called;
  FlightGroup group;
  std::uint64_t sequence = 0;       ///< of the communicator's collectives
  std::vector<int> ranks;           ///< those that are different from the others, ascending
  std::map<int, FlightCall> calls;  ///< of those that made it, by rank
  std::int64_t at_ns = 0;           ///< when the first of them made it, since 1970
};

/// Whether two calls are those that the ranks of a communicator must make together.
bool same_call(const FlightCall& a, const FlightCall& b);

/// `logs`: of one run, by rank; ranks may be missing. A rank that others wait for, and that waits for no rank itself,
/// is the cause rather than one that waits in turn; among several causes the earliest call counts.
std::optional<FirstDivergence> find_first_divergence(std::span<const FlightLog> logs);

}  // namespace tessera::tools
