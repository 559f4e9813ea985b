// Memory that is reused, so that no message allocates in the steady state.
#pragma once

#include <array>
#include <bit>
#include <boost/intrusive/unordered_set.hpp>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "backends/tcp/frame.h"
#include "tessera/comm/transport/match_queues.h"

namespace tessera::comm::tcp {

/// Objects that never move. acquire() acquires an object; release() or the pool's destructor releases it.
template <class T>
class ObjectPool {
 public:
  T& acquire() {
    if (free_.empty()) {
      T& item = all_.emplace_back();
      if (free_.capacity() < all_.size()) free_.reserve(2 * all_.size());  // so that release() never allocates
      return item;
    }
    T* item = free_.back();
    free_.pop_back();
    return *item;
  }
  void release(T& item) noexcept {
    item = T();
    free_.push_back(&item);
  }

 private:
  std::deque<T> all_;
  std::vector<T*> free_;
};

/// Buffers of up to kEagerLimit bytes, in powers of two.
class BufferPool {
 public:
  std::byte* acquire(std::size_t bytes) {
    const std::size_t shelf = shelf_of(bytes);
    std::vector<std::byte*>& free = free_[shelf];
    if (free.empty()) {
      all_.push_back(std::make_unique_for_overwrite<std::byte[]>(kSmallest << shelf));
      if (++made_[shelf] > free.capacity()) free.reserve(2 * made_[shelf]);  // as above
      return all_.back().get();
    }
    std::byte* buffer = free.back();
    free.pop_back();
    return buffer;
  }
  /// `bytes` is the value passed to acquire().
  void release(std::byte* buffer, std::size_t bytes) noexcept { free_[shelf_of(bytes)].push_back(buffer); }

 private:
  static constexpr std::size_t kSmallest = 256;
  static constexpr std::size_t kShelves = std::bit_width(kEagerLimit / kSmallest);
  static std::size_t shelf_of(std::size_t bytes) {
    return static_cast<std::size_t>(bytes <= kSmallest ? 0 : std::bit_width((bytes - 1) / kSmallest));
  }
  std::vector<std::unique_ptr<std::byte[]>> all_;
  std::array<std::vector<std::byte*>, kShelves> free_;
  std::array<std::size_t, kShelves> made_{};
};

/// Message::state.
inline constexpr std::uint32_t kIdle = 0;
inline constexpr std::uint32_t kSending = 1;
inline constexpr std::uint32_t kReceiving = 2;

/// The base of entries of a TagTable.
struct Tagged : boost::intrusive::unordered_set_base_hook<> {
  MessageTag tag;
};

/// Finds entries by tag. Does not own them.
template <class T>
class TagTable {
 public:
  TagTable() : buckets_(64), set_({buckets_.data(), buckets_.size()}) {}
  T* find(const MessageTag& tag) noexcept {
    const auto at = set_.find(tag, Hash(), Equal());
    return at == set_.end() ? nullptr : &*at;
  }
  void insert(T& item) {
    if (set_.size() >= buckets_.size()) grow();
    set_.insert(item);
  }
  void erase(T& item) noexcept { set_.erase(set_.iterator_to(item)); }
  std::size_t size() const noexcept { return set_.size(); }
  /// Returns the entries of one communicator.
  std::vector<T*> of(std::uint32_t communicator) {
    std::vector<T*> found;
    for (T& item : set_)
      if (item.tag.communicator == communicator) found.push_back(&item);
    return found;
  }

 private:
  struct Hash {
    std::size_t operator()(const MessageTag& tag) const noexcept {
      std::uint64_t x = (std::uint64_t{tag.communicator} << 52) ^ (std::uint64_t{tag.operation} << 20) ^ tag.step;
      x *= 0x9e3779b97f4a7c15U;
      return static_cast<std::size_t>(x ^ (x >> 32));
    }
    std::size_t operator()(const T& item) const noexcept { return (*this)(item.tag); }
  };
  struct Equal {
    bool operator()(const T& a, const T& b) const noexcept { return a.tag == b.tag; }
    bool operator()(const MessageTag& tag, const T& item) const noexcept { return tag == item.tag; }
    bool operator()(const T& item, const MessageTag& tag) const noexcept { return tag == item.tag; }
  };
  using Set = boost::intrusive::unordered_set<T, boost::intrusive::hash<Hash>, boost::intrusive::equal<Equal>,
                                              boost::intrusive::power_2_buckets<true>>;

  void grow() {
    std::vector<typename Set::bucket_type> larger(2 * buckets_.size());
    set_.rehash({larger.data(), larger.size()});
    buckets_.swap(larger);  // the set's buckets keep their addresses
  }

  std::vector<typename Set::bucket_type> buckets_;
  Set set_;
};

}  // namespace tessera::comm::tcp
