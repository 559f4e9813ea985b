// The memory that benchmarked calls move: the host's or a device's.
#pragma once

#include <memory>

#include "tessera/base/device_runtime.h"
#include "tessera/base/memory_pool.h"
#include "tessera/comm/communicator.h"
#include "tools/bench/operations.h"

namespace tessera::tools {

/// Of one rank; used by one thread.
class BenchMemory {
 public:
  struct Block {
    base::Buffer memory;  ///< what calls get
    base::Buffer copy;    ///< of it, for the host; empty where the host reads the memory itself
    std::byte* host() const { return copy ? copy.bytes_at(0) : memory.bytes_at(0); }
  };

  /// All outlive it. `communicator_memory`: what the backend moves fastest; else the C library's, or the device's.
  /// Throws InvalidUsage where the communicator doesn't take the device's memory.
  BenchMemory(comm::Communicator& world, base::DeviceRuntime& device, bool communicator_memory);

  base::Device device() const { return runtime_.device(); }
  bool on_host() const { return runtime_.host_accessible(); }
  /// Bytes that a device's caches can't hold, and its memory easily can.
  std::size_t larger_than_caches() const;
  base::MemoryPool& host_pool() { return pool_; }

  Block allocate(std::size_t bytes);
  void put(Block& block, std::size_t bytes);  ///< what the host wrote to its first bytes; waits
  void get(Block& block, std::size_t bytes);  ///< the other way

  /// Moves as many bytes as `traffic` loads and stores, within the device's memory, and waits. Not for the host.
  void move(const MemoryTraffic& traffic);

 private:
  base::Buffer allocate_there(std::size_t bytes);

  comm::Communicator& world_;
  base::DeviceRuntime& runtime_;
  const bool communicator_memory_;
  base::MemoryPool pool_;
  std::unique_ptr<base::Stream> stream_;
  base::Buffer from_, to_;  ///< of move()
};

}  // namespace tessera::tools
