// Notices the death of other ranks, from a thread of its own.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

/// What tells that one rank lives: its connection, whose end tells its death, and its process (0: not visible from
/// here).
struct Lifeline {
  int rank = 0;
  int connection = -1;  ///< owned by the caller, outlives the watch; -1: none
  int pid = 0;
};

class Watch {
 public:
  Watch(const std::vector<Lifeline>& lifelines, std::function<void(int rank)> lost);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::comm
