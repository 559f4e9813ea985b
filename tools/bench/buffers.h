// The buffers of one operation on one rank, and the call on them.
#pragma once

#include <string>

#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"
#include "tools/bench/data.h"
#include "tools/bench/memory_traffic.h"

namespace tessera::tools {

/// An operation with its arguments, as one rank calls it.
struct BenchCall {
  BenchOp::Id id = BenchOp::Id::all_reduce;
  comm::ConstView in = {};
  comm::View out = {};
  comm::ReduceOp op = {};
  int root = 0;
  comm::Work start(comm::Communicator& world) const;
  /// Evicts its buffers from the caches.
  void evict() const;
};

/// In place, one of the two buffers is both input and output: the larger one.
class BenchBuffers {
 public:
  /// `memory` outlives it.
  BenchBuffers(BenchMemory& memory, int rank, const BenchData& data, const BenchShape& largest);

  /// Writes fresh inputs and poisons all other memory that the call accesses.
  void fill(const BenchShape& shape, bool in_place);
  BenchCall call(const BenchShape& shape, bool in_place) const;
  /// The call's output in host memory: the buffer itself, or a copy that is made here.
  comm::View output(const BenchShape& shape, bool in_place);

 private:
  struct Pointers {
    std::byte* in = nullptr;
    std::byte* out = nullptr;
  };
  Pointers pointers(const BenchShape& shape, bool in_place, Pointers begin) const;

  BenchMemory& memory_;
  const BenchData data_;
  const int rank_;
  BenchMemory::Block in_;
  BenchMemory::Block out_;
};

}  // namespace tessera::tools
