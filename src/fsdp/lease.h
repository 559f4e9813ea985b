// A pool of unsharded buffers, handed out as leases: a released buffer is reused once an event is reached.
//
// The host runs ahead of the device. When it resharded a unit, the kernels that read the unit may not even have begun,
// and the gather that wants the buffer next belongs to another stream. Neither may wait on the host:
//
//   compute stream   .. forward of unit 1 | record E ..
//   host             lease.release(E)       acquire() for unit 3: the buffer is "free" at once
//   gather stream                           wait(E) | gather unit 3 into it ..
//
// So release() takes the event after the last use, and acquire() makes the stream of the next user wait for it. Two
// buffers are enough for a model of any depth if units are used one after another, and the peak of memory is what the
// host has leased at one time, whatever the device is doing.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

class LeasePool;

/// Exclusive use of a pooled buffer by a named owner. Move-only. release() is explicit, because it needs an event.
/// Destroying an unreturned lease (after an error) waits for nothing; the caller must have stopped all streams.
class TESSERA_API Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;  ///< leaves `other` empty
  /// Releases the current buffer as the destructor does; leaves `other` empty.
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  void* data() const { return data_; }                         ///< null if empty; the pool owns the memory
  std::size_t bytes() const { return bytes_; }                 ///< bytes requested from acquire(); 0 if empty
  const std::string& owner() const { return owner_; }          ///< owner passed to acquire(): the name of a unit
  explicit operator bool() const { return pool_ != nullptr; }  ///< true until release()

  /// Releases the buffer. Its next lease starts after `released`.
  void release(Event released);

 private:
  friend class LeasePool;
  LeasePool* pool_ = nullptr;
  std::size_t slot_ = 0;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::string owner_;
};

/// A pool of buffers of one memory category and one rank. Used by one thread; outlives its leases.
class TESSERA_API LeasePool {
 public:
  using Allocate = std::function<Buffer(std::size_t bytes)>;  ///< memory that no tracker counts: the pool tracks it
  /// Fills released memory with NaN once `released` is reached; the returned event follows that fill.
  using Poison = std::function<Event(const Event& released, void* data, std::size_t bytes)>;
  LeasePool(MemoryTracker& memory_tracker, MemoryCategory use, Allocate allocate,
            Poison poison);  ///< `poison` may be empty
  ~LeasePool();
  LeasePool(const LeasePool&) = delete;
  LeasePool& operator=(const LeasePool&) = delete;

  /// Leases an idle buffer of at least `bytes`, or allocates one. Makes `user` wait until the previous lease's
  /// `released` event is reached.
  Lease acquire(std::size_t bytes, std::string owner, Stream& user);

  /// Owners of the current leases.
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
