// Reads the files of the flight recorder, and finds the first call of a run on which its ranks diverged.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/comm/flight_recorder/format.h"
#include "tessera/comm/types.h"

namespace tessera::tools {

/// A call that a rank made.
struct FlightCall {
  std::uint64_t number = 0;  ///< of the rank's calls, from 1
  comm::OpKind kind = comm::OpKind::barrier;
  base::DType dtype = base::DType::f32;
  comm::ReduceOp::Kind reduce = comm::ReduceOp::Kind::sum;
  std::uint32_t communicator = 0;
  std::int32_t root = 0;
  std::uint64_t sequence = 0;  ///< of the communicator's collectives, from 1; 0 for messages
  std::uint64_t bytes = 0;
  std::int64_t step = 0;
  std::int64_t issued_ns = 0;  ///< since 1970, as the rank's host has it
  std::int64_t ended_ns = 0;   ///< likewise; 0: the rank has not seen the end
  comm::flight::State state = comm::flight::State::issued;
  std::string label;

  bool ended_well() const { return state == comm::flight::State::done; }
};

/// A communicator of a rank.
struct FlightGroup {
  std::string name;          ///< "world", "world.2"; the same on all its ranks
  std::vector<int> members;  ///< ranks of the world, by rank of the communicator
  auto operator<=>(const FlightGroup&) const = default;
};

struct FlightFailure {
  std::int64_t at_ns = 0;  ///< since 1970
  std::string text;        ///< "Timeout: all_gather #3 ..."
};

/// How a rank ended.
enum class FlightEnd : std::uint8_t {
  none,       ///< it wrote nothing: it was killed, or it still runs
  closed,     ///< it closed its communicators
  exception,  ///< an exception ended it
};

/// One rank's file.
struct FlightLog {
  int rank = 0;
  int ranks = 0;  ///< of the world
  std::string run, host, backend;
  int process = 0;
  std::int64_t started_ns = 0;                  ///< since 1970
  std::map<std::uint32_t, FlightGroup> groups;  ///< by number of the communicator on this rank
  std::vector<FlightCall> calls;                ///< the last ones, by number
  std::vector<FlightFailure> failures;          ///< in order of time
  FlightEnd end = FlightEnd::none;
};

/// Without groups if the rank ended before all ranks had joined. Throws InvalidUsage if the file can't be read, was
/// cut, or is not one of the flight recorder.
FlightLog read_flight_log(const std::string& path);

/// The files of the newest run in a directory, by rank, of those that had joined; `ignored` gets the names of files of
/// older runs. Throws InvalidUsage as above, and if there is no file.
std::vector<FlightLog> read_flight_logs(const std::string& directory, std::vector<std::string>& ignored);

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
