// Problems, inputs and expected outputs of the tests of schedules.
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
/// All that known_algorithms lists.
std::vector<Named> algorithms(bool ordered_only);

inline bool adds(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}
inline bool has_equal_parts(OpKind kind) {
  return kind != OpKind::all_reduce && kind != OpKind::broadcast && kind != OpKind::reduce;
}

/// What each rank gives. `exact`: small whole numbers whose sums and products need no rounding in any order; else full
/// mantissas, with NaNs and infinities among them.
std::vector<Bytes> make_inputs(const ScheduleWorld& world, bool exact, std::uint64_t seed);

/// What each rank must get, computed serially.
std::vector<Bytes> expected(const ScheduleWorld& world, const std::vector<Bytes>& inputs);

/// "" or where outputs differ from what is expected.
std::string difference(const ScheduleWorld& world, const std::vector<Bytes>& outputs, const std::vector<Bytes>& wanted);

/// check(), race(), then runs in `orders` orders of events; "" or the first thing that is wrong.
std::string verify(const ScheduleWorld& world, bool exact, int orders = 3);

std::string describe(const CollectiveSpec& problem, const std::string& algorithm);

/// The _v form of `problem` with parts of random lengths, some of them empty; all_to_all has other ones for each rank.
std::vector<CollectiveSpec> with_parts(CollectiveSpec problem, std::uint64_t seed);

}  // namespace tessera::comm_test
