// Unsharded buffers, lent from a pool and taken back with a promise: "free once this event is reached".
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

class LeasePool;

/// Memory with an owner. Move-only; returning it is explicit, because it needs an event. A lease that is destroyed
/// unreturned (after an error) waits for nothing: its pool is told that every stream has stopped.
class TESSERA_API Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& owner() const { return owner_; }
  explicit operator bool() const { return pool_ != nullptr; }

  /// Gives the memory back. Who leases it next starts after `released`.
  void give_back(Event released);

 private:
  friend class LeasePool;
  LeasePool* pool_ = nullptr;
  std::size_t slot_ = 0;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string owner_;
};

/// Buffers of one use and one rank. One thread; outlives its leases.
class TESSERA_API LeasePool {
 public:
  using Allocate = std::function<Buffer(std::size_t bytes)>;  ///< memory that is booked nowhere: the pool books it
  /// Fills memory that was given back with NaN once `released` is reached; the event returned comes after that.
  using Poison = std::function<Event(const Event& released, void* data, std::size_t bytes)>;
  LeasePool(MemoryTracker& memory_tracker, MemoryCategory use, Allocate allocate,
            Poison poison);  ///< `poison` may be empty
  ~LeasePool();
  LeasePool(const LeasePool&) = delete;
  LeasePool& operator=(const LeasePool&) = delete;

  /// Idle memory of at least `bytes`, else new memory. `user` is made to wait until its last tenant was done with it.
  Lease acquire(std::size_t bytes, std::string owner, Stream& user);

  /// Owners of what is out now.
  std::vector<std::string> owners() const;

 private:
  friend class Lease;
  struct Slot {
    Buffer buffer;
    Event released;
    bool out = false;
    std::size_t tracked = 0;
    std::string owner;
  };
  void release(std::size_t slot, Event released);
  MemoryTracker& memory_tracker_;
  const MemoryCategory use_;
  const Allocate allocate_;
  const Poison poison_;
  std::vector<Slot> slots_;
};

}  // namespace tessera::fsdp
