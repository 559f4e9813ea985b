// The memory of benchmarked calls, which is the host's or a device's, and the calls on it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/window.h"
#include "tools/bench/operations.h"

namespace tessera::tools {

/// The memory of one rank; used by one thread.
class BenchMemory {
 public:
  struct Block {
    base::Buffer memory;  ///< the memory passed to calls
    base::Buffer copy;    ///< its copy for the host; empty if the host accesses the memory itself
    std::byte* host() const { return copy ? copy.bytes_at(0) : memory.bytes_at(0); }
  };

  /// All arguments outlive it. `communicator_memory`: the memory that the backend moves fastest; else that of the C
  /// library or the device. Throws InvalidUsage if the communicator doesn't support the device's memory.
  BenchMemory(comm::Communicator& world, base::DeviceRuntime& device, bool communicator_memory);

  base::Device device() const { return runtime_.device(); }
  bool on_host() const { return runtime_.host_accessible(); }
  /// Bytes that exceed a device's caches and easily fit into its memory.
  std::size_t larger_than_caches() const;
  base::MemoryPool& host_pool() { return pool_; }

  Block allocate(std::size_t bytes);
  /// Copies the first bytes between the memory and the host's copy, if there is one, and waits.
  void copy(Block& block, std::size_t bytes, base::CopyDirection direction);

  /// Moves as many bytes within the device's memory as `traffic` loads and stores, and waits. Not for the host.
  void move(const MemoryTraffic& traffic);

 private:
  base::Buffer allocate_there(std::size_t bytes);
  base::Buffer allocate_of_device(std::size_t bytes);

  comm::Communicator& world_;
  base::DeviceRuntime& runtime_;
  const bool communicator_memory_;
  base::MemoryPool pool_;
  std::unique_ptr<base::Stream> stream_;
  base::Buffer from_, to_;  ///< of move()
};

/// An operation with its arguments, as one rank calls it.
struct BenchCall {
  comm::OpKind kind = comm::OpKind::all_reduce;
  comm::ConstView in = {};
  comm::View out = {};
  comm::ReduceOp op = {};
  int root = 0;
  Exchange exchange = Exchange::ring;
  std::vector<std::size_t> counts = {};               ///< of unequal parts; empty: they are equal
  std::vector<std::size_t> out_counts = {};           ///< of all_to_all_v: what each rank sends here
  mutable std::shared_ptr<comm::Window> window = {};  ///< of put and get, from the first call
  comm::Work start(comm::Communicator& world) const;
  /// Calls once and waits; with pairs of ranks, all messages of their exchange.
  void run(comm::Communicator& world) const;
  /// As run(). Returns the algorithm; nothing if `may_refuse` and it was refused, before anything was sent
  /// and equally on all ranks.
  std::optional<std::string> try_on(comm::Communicator& world, bool may_refuse) const;
  /// Of puts and gets.
  void exchange_one_sided(comm::Communicator& world, int peer, bool first) const;
  /// Evicts its buffers from the caches.
  void evict() const;
};

/// In place, one of the two buffers is both input and output: the larger one.
class BenchBuffers {
 public:
  /// `memory` outlives it. `misaligned`: both begin one element after an aligned address.
  BenchBuffers(BenchMemory& memory, int rank, const BenchData& data, const BenchShape& largest,
               bool misaligned = false);

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
  const std::size_t begin_;  ///< of both
  BenchMemory::Block in_;
  BenchMemory::Block out_;
};

}  // namespace tessera::tools
