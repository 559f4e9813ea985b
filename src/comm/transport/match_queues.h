// Queues of items to be matched by peer and tag. Intrusive: T has peer, tag, next and previous, and is in no other
// queue meanwhile.
#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>

#include "tessera/comm/transport.h"

namespace tessera::comm {

/// A doubly linked FIFO list.
template <class T>
class MatchList {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  T* first() const noexcept { return first_; }
  void append(T& item) noexcept {
    item.next = nullptr;
    item.previous = last_;
    (last_ != nullptr ? last_->next : first_) = &item;
    last_ = &item;
  }
  void remove(T& item) noexcept {
    (item.previous != nullptr ? item.previous->next : first_) = item.next;
    (item.next != nullptr ? item.next->previous : last_) = item.previous;
    item.next = nullptr;
    item.previous = nullptr;
  }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr;
};

/// The communicators no longer in use on this rank.
class DiscardedCommunicators {
 public:
  void add(std::uint32_t communicator) noexcept {
    if (communicator < numbers_.size()) numbers_.set(communicator);
  }
  bool has(const MessageTag& tag) const noexcept {
    return tag.communicator < numbers_.size() && numbers_.test(tag.communicator);
  }

 private:
  std::bitset<kMaxCommunicators> numbers_;
};

template <class T>
class MatchTable {
 public:
  void insert(T& item) noexcept { chain_of(item.peer, item.tag).append(item); }
  void remove(T& item) noexcept { chain_of(item.peer, item.tag).remove(item); }
  /// The oldest item of that peer and tag that `wanted` accepts; null if there is none.
  template <class Wanted>
  T* find(int peer, const MessageTag& tag, Wanted wanted) noexcept {
    for (T* item = chain_of(peer, tag).first(); item != nullptr; item = item->next)
      if (item->peer == peer && item->tag == tag && wanted(*item)) return item;
    return nullptr;
  }
  T* find(int peer, const MessageTag& tag) noexcept {
    return find(peer, tag, [](const T&) { return true; });
  }
  /// Removes each item that `wanted` accepts and passes it to `use`.
  template <class Wanted, class CollectiveUse>
  void drain(Wanted wanted, CollectiveUse use) noexcept {
    for (MatchList<T>& chain : chains_)
      for (T *item = chain.first(), *next = nullptr; item != nullptr; item = next) {
        next = item->next;
        if (!wanted(*item)) continue;
        chain.remove(*item);
        use(*item);
      }
  }

 private:
  static constexpr std::size_t kChains = 256;
  MatchList<T>& chain_of(int peer, const MessageTag& tag) noexcept {
    std::uint64_t hash = (std::uint64_t{tag.communicator} << 32 | tag.operation) * 0x9e3779b97f4a7c15u;
    hash ^= (static_cast<std::uint64_t>(peer) << 24 | tag.step) * 0xff51afd7ed558ccdu;
    return chains_[(hash >> 32) % kChains];
  }
  std::array<MatchList<T>, kChains> chains_{};
};

}  // namespace tessera::comm
