// Runs the schedules of all ranks against each other in memory, in a random order of all possible events, and proves
// that the result is the same in every order: no step may write memory that another step may be reading or writing.
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

/// The location of a BufferId in a rank's memory: in and out share a buffer if the call is in place.
struct Spot {
  int buffer = 0;  ///< 0 in, 1 out, 2 scratch, 3 factor
  std::size_t offset = 0;
};

struct ScheduleWorld {
  /// Builds the schedules of all ranks. `problem.rank` and `problem.in_place` are set per rank: in place by the bits of
  /// `in_place_ranks`, if the operation allows it.
  ScheduleWorld(const CollectiveSpec& spec, std::string_view algorithm, std::uint32_t in_place_ranks = 0);
  /// For ranks whose specs differ in more (all_to_all with parts of any length).
  ScheduleWorld(std::vector<CollectiveSpec> all, std::string_view algorithm);

  std::vector<CollectiveSpec> specs;
  std::vector<Schedule> schedules;

  std::size_t in_count(int rank) const;
  std::size_t out_count(int rank) const;
  Spot spot(int rank, BufferId place) const;
  std::size_t buffer_bytes(int rank, int buffer) const;

  /// Returns "" or the first structural defect: regions outside their buffers, steps before their dependencies,
  /// messages without a partner or with two lengths, cycles.
  std::string check() const;
  /// Returns "" or two steps that may access the same memory concurrently.
  std::string race() const;
  /// For a barrier: returns "" or a rank that may leave before another one has arrived.
  std::string early_leaver() const;
  /// Runs all ranks on `inputs` and fills `outputs`; returns "" or the problem. Rank r's factor is factor(r) of
  /// reference.h.
  std::string run(std::uint64_t seed, const std::vector<Bytes>& inputs, std::vector<Bytes>& outputs) const;

  std::uint64_t bytes_sent(int rank) const;
};

/// A message: the step that sends it and the step that receives it.
struct MessagePair {
  int from = 0;
  std::uint32_t send = 0;
  int to = 0;
  std::uint32_t receive = 0;
};
/// Throws std::runtime_error if a message has no partner.
std::vector<MessagePair> messages_of(const ScheduleWorld& world);

/// Removes the `which`-th dependency of one rank's schedule, to simulate a mistake in a schedule.
void drop_dependency(Schedule& schedule, std::size_t which);

}  // namespace tessera::comm_test
