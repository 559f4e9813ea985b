// Assignment 6: what you write in wrap.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace assignment {

/// A model of equal blocks, which trains under fsdp, and the links between its ranks.
struct Situation {
  int ranks = 4;
  int blocks = 8;                     ///< in forward order
  std::int64_t block_parameters = 0;  ///< of one block, in f32
  std::int64_t root_parameters = 0;   ///< of the root, which is gathered for the whole step
  double forward_seconds = 0;         ///< of one block
  double backward_seconds = 0;        ///< of one block
  double latency = 0;                 ///< of an operation, in seconds
  double bytes_per_second = 0;        ///< of a rank's link
  std::int64_t unsharded_bytes = 0;   ///< the most that gathered parameters may occupy at a time
};

/// How many consecutive blocks each unit has, in forward order: {2, 2, 4} are three units.
std::vector<int> wrap(const Situation& situation);

}  // namespace assignment
