#include "tessera/fsdp/lease.h"

#include <utility>

namespace tessera::fsdp {

Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      slot_(other.slot_),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      owner_(std::move(other.owner_)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  if (pool_ != nullptr) pool_->release(slot_, Event());
  pool_ = std::exchange(other.pool_, nullptr);
  slot_ = other.slot_;
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  owner_ = std::move(other.owner_);
  return *this;
}

Lease::~Lease() {
  if (pool_ != nullptr) pool_->release(slot_, Event());
}

void Lease::release(Event released) {
  if (pool_ == nullptr) throw InvalidUsage("lease: released twice");
  std::exchange(pool_, nullptr)->release(slot_, std::move(released));
  data_ = nullptr;
  bytes_ = 0;
}

LeasePool::LeasePool(MemoryTracker& memory_tracker, MemoryCategory use, Allocate allocate, Poison poison)
    : memory_tracker_(memory_tracker), use_(use), allocate_(std::move(allocate)), poison_(std::move(poison)) {}

LeasePool::~LeasePool() {
  for (const Slot& slot : slots_) {
    if (slot.out) {
      memory_tracker_.remove(use_, slot.tracked);
    } else {
      memory_tracker_.hold(-static_cast<std::int64_t>(slot.buffer.bytes()));
    }
  }
}

Lease LeasePool::acquire(std::size_t bytes, std::string owner, Stream& user) {
  std::size_t best = slots_.size();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.out || slot.buffer.bytes() < bytes) continue;
    if (best == slots_.size() || slot.buffer.bytes() < slots_[best].buffer.bytes()) best = i;
  }
  if (best == slots_.size()) {
    slots_.push_back({.buffer = allocate_(bytes)});
    memory_tracker_.hold(static_cast<std::int64_t>(slots_.back().buffer.bytes()));
  }
  Slot& slot = slots_[best];
  user.wait(slot.released);
  slot.released = Event();
  slot.out = true;
  slot.tracked = bytes;
  slot.owner = owner;
  memory_tracker_.hold(-static_cast<std::int64_t>(slot.buffer.bytes()));
  memory_tracker_.add(use_, bytes);

  Lease lease;
  lease.pool_ = this;
  lease.slot_ = best;
  lease.data_ = slot.buffer.data();
  lease.bytes_ = bytes;
  lease.owner_ = std::move(owner);
  return lease;
}

void LeasePool::release(std::size_t index, Event released) {
  Slot& slot = slots_[index];
  slot.out = false;
  slot.released = std::move(released);
  memory_tracker_.remove(use_, slot.tracked);
  memory_tracker_.hold(static_cast<std::int64_t>(slot.buffer.bytes()));
  if (poison_) slot.released = poison_(slot.released, slot.buffer.data(), slot.buffer.bytes());
}

std::vector<std::string> LeasePool::owners() const {
  std::vector<std::string> owners;
  for (const Slot& slot : slots_)
    if (slot.out) owners.push_back(slot.owner);
  return owners;
}

}  // namespace tessera::fsdp
