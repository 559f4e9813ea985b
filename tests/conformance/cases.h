// Every operation x dtype x reduce op x size x in place x memory against a serial reference, to the bit; and how a
// communicator behaves where more than one thing is under way. For any backend: ranks may be threads or processes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tests/conformance/reference.h"

namespace tessera::conformance {

struct Case {
  OpKind kind;
  DType dtype;
  ReduceOp::Kind reduce;
  std::size_t count;  ///< per rank's part
  bool in_place;
  bool window_in;  ///< memory of the communicator, else ordinary
  bool window_out;
  std::uint64_t seed;

  std::string name(int ranks) const;
};

/// For each operation and dtype every size, every reduce op, and every combination of place, at least once, in seeded
/// order. `full`: all combinations. `stride`: of the small set only every so many-th.
std::vector<Case> cases_for(OpKind kind, bool full, std::size_t stride = 1);
/// One of 2^31 + 17 bytes in the larger buffer.
Case huge_case(OpKind kind);
std::vector<OpKind> all_kinds();

/// Runs the case on every rank of `comm`. "" or what is wrong on this rank.
std::string run_case(Communicator& comm, const Case& c);

/// What else every backend must do. `run` returns "" or what is wrong on this rank.
struct Behaviour {
  std::string_view name;
  std::string (*run)(Communicator& world);
  int least_ranks;
};
std::vector<Behaviour> behaviours();

}  // namespace tessera::conformance
