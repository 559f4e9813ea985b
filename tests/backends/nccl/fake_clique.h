// State that the fake's communicators of one group share: operations synchronize here.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "tests/backends/nccl/fake_cuda.h"
#include "tests/conformance/reference.h"

namespace tessera::nccl_test {

using base::DType;
using comm::ReduceOp;
using conformance::Bytes;

/// One rank's call of a collective.
struct Contribution {
  enum class Kind { all_reduce, all_gather, reduce_scatter, broadcast, reduce };
  Kind kind = Kind::all_reduce;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;  ///< as passed to NCCL's function
  ncclDataType_t type = ncclFloat32;
  ReduceOp op = {};  ///< scalar: premul_sum's factor
  int root = 0;
  std::optional<std::size_t> offset;  ///< of a reduction between windows: its input's, in the rank's own table
};

struct Round {
  std::vector<std::optional<Contribution>> parts;
  bool done = false;
};

/// A send or a receive.
struct Message {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool done = false;
};

struct SplitRound {
  struct Choice {
    int color = 0;
    int key = 0;
  };
  std::vector<std::optional<Choice>> choices;
  std::vector<int> ranks;  ///< rank in the child by rank of the parent; set when all ranks have called
  std::map<int, std::shared_ptr<struct Clique>> children;
};

struct Clique {
  explicit Clique(int ranks) : size(ranks) {}
  const int size;
  int here = 0;                              ///< number of initialized ranks
  std::set<std::pair<int, int>> connecting;  ///< ranks, and those that they want to exchange data with
  std::map<std::uint64_t, Round> rounds;
  std::map<std::uint64_t, SplitRound> splits;
  std::map<std::uint64_t, std::map<int, std::size_t>> windows;  ///< bytes by rank, of each round of registrations
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> sent;      ///< by sender and receiver
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> received;  ///< the same

  /// Returns true once all ranks have called; then the result is computed. Never true if the ranks call different
  /// operations.
  bool join(std::uint64_t number, int rank, const Contribution& part);
  void match(int sender, int receiver);
};

DType dtype_of_vendor(ncclDataType_t type);

}  // namespace tessera::nccl_test
