// Specs, inputs and expected outputs of the schedule tests.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/comm/schedule_world.h"

namespace tessera::comm_test {

struct Named {
  OpKind kind;
  std::string name;
};
/// All algorithms that known_algorithms() lists.
std::vector<Named> algorithms(bool ordered_only);

inline bool adds(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}
inline bool has_equal_parts(OpKind kind) {
  return kind != OpKind::all_reduce && kind != OpKind::broadcast && kind != OpKind::reduce;
}

/// The input of each rank. `exact`: small whole numbers whose sums and products need no rounding in any order; else
/// full mantissas, with NaNs and infinities among them.
std::vector<Bytes> make_inputs(const ScheduleWorld& world, bool exact, std::uint64_t seed);

/// The expected output of each rank, computed serially.
std::vector<Bytes> expected(const ScheduleWorld& world, const std::vector<Bytes>& inputs);

/// The first difference between outputs and expected outputs, or "".
std::string difference(const ScheduleWorld& world, const std::vector<Bytes>& outputs, const std::vector<Bytes>& wanted);

/// Runs check(), race() and then `orders` random orders of events; returns the first problem or "".
std::string verify(const ScheduleWorld& world, bool exact, int orders = 3);

std::string describe(const CollectiveSpec& spec, const std::string& algorithm);

/// The _v form of `spec` with parts of random lengths, some of them empty; for all_to_all the lengths differ between
/// the ranks.
std::vector<CollectiveSpec> with_parts(CollectiveSpec spec, std::uint64_t seed);

}  // namespace tessera::comm_test
