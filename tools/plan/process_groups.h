// The process groups of a step: which ranks an operation joins, for every rank of the world.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "tessera/comm/sim/network.h"
#include "tools/plan/step_graph.h"

namespace tessera::tools {

/// Numbers the groups of all ranks. Operations with the same members share a group; the group of all ranks is 0.
class ProcessGroups {
 public:
  struct Group {
    int id = 0;
    comm::sim::RankSet members;
  };
  /// Those of all operations of the step, in a world of `ranks`.
  ProcessGroups(const StepGraph& step, int ranks);

  /// The group of the rank that calls the operation. The operation is one of the step.
  Group of(const comm::sim::SimulatedOp& operation, int rank) const;
  std::vector<Group> of_rank(int rank) const;  ///< one of each shape, in the order of the first calls
  std::vector<Group> all() const;              ///< by number

 private:
  struct Shape {  // equal for the communicators along one axis
    int stride = 1;
    int ranks = 1;
    int first_id = 0;
  };
  Group group_of(const Shape& shape, int rank) const;
  const int ranks_;
  std::vector<Shape> shapes_;
  std::map<std::pair<int, int>, std::size_t> index_;  // by stride and ranks
};

/// The ranks in order.
std::vector<int> ranks_in(const comm::sim::RankSet& members);

}  // namespace tessera::tools
