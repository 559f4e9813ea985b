// Runs the schedules of all ranks against each other in memory, in a random order of everything that may happen, and
// proves that no order can give anything else: no step may write what another one may be reading or writing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/schedule.h"
#include "tests/conformance/reference.h"

namespace tessera::comm_test {

using namespace tessera::base;
using namespace tessera::comm;
using conformance::Bytes;

/// What one rank's places are, in its memory: in and out share a buffer where the call is in place.
struct Spot {
  int buffer = 0;  ///< 0 in, 1 out, 2 scratch, 3 factor
  std::size_t offset = 0;
};

struct ScheduleWorld {
  /// All ranks' schedules. `problem.rank` and `problem.in_place` are set per rank: in place by the bits of
  /// `in_place_ranks`, where the operation allows it.
  ScheduleWorld(const CollectiveSpec& problem, std::string_view algorithm, std::uint32_t in_place_ranks = 0);
  /// Ranks whose problems differ in more (all_to_all with parts of any length).
  ScheduleWorld(std::vector<CollectiveSpec> all, std::string_view algorithm);

  std::vector<CollectiveSpec> problems;
  std::vector<Schedule> schedules;

  std::size_t in_count(int rank) const;
  std::size_t out_count(int rank) const;
  Spot spot(int rank, BufferId place) const;
  std::size_t buffer_bytes(int rank, int buffer) const;

  /// "", or what is wrong with the schedules as such: regions outside of their buffers, steps before those they wait
  /// for, messages without a partner or of two lengths, a circle of waiting.
  std::string check() const;
  /// "", or two steps that may meet in memory.
  std::string race() const;
  /// Of a barrier: "", or a rank that may leave before another one has come.
  std::string early_leaver() const;
  /// Runs all ranks on `inputs` and fills `outputs`; "" or what went wrong. Rank r's factor is reference's factor(r).
  std::string run(std::uint64_t seed, const std::vector<Bytes>& inputs, std::vector<Bytes>& outputs) const;

  std::uint64_t bytes_sent(int rank) const;
};

/// One message: the step that sends it and the one that receives it.
struct MessagePair {
  int from = 0;
  std::uint32_t send = 0;
  int to = 0;
  std::uint32_t receive = 0;
};
/// Throws std::runtime_error where one has no partner.
std::vector<MessagePair> messages_of(const ScheduleWorld& world);

/// Takes away the `which`-th dependency of one rank's schedule: what a writer of schedules forgets.
void drop_dependency(Schedule& schedule, std::size_t which);

}  // namespace tessera::comm_test
