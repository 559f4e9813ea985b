// The groups that a poll looks at. A rank may have thousands of communicators, most of which are idle.
#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// What a group needs to be in the list. Idle groups are in no list, and cost a poll nothing.
class TESSERA_API ActiveGroup {
 public:
  ActiveGroup() = default;
  ActiveGroup(const ActiveGroup&) = delete;
  ActiveGroup& operator=(const ActiveGroup&) = delete;
  bool any_in_flight() const noexcept { return in_flight_.load() != 0; }

 protected:
  ~ActiveGroup() = default;
  std::atomic<std::uint32_t> in_flight_{0};  ///< operations, and those whose callbacks have yet to return

 private:
  friend class ActiveGroups;
  std::atomic<bool> listed_{false};  ///< is in the list, or on the way to it
  ActiveGroup* next_ = nullptr;
  std::uint32_t idle_polls_ = 0;  ///< in a row
};

/// The groups with operations in flight. A group stays for some polls without any, so that a rank which calls one
/// operation after another does not add and remove its group each time.
class TESSERA_API ActiveGroups {
 public:
  static constexpr std::uint32_t kIdlePolls = 100;

  /// Any thread, after it has counted an operation in flight: later polls look at the group.
  void activate(ActiveGroup& group) noexcept {
    // Sequentially consistent, as the removal in update(): one of the two sees what the other has written.
    if (group.listed_.load() || group.listed_.exchange(true)) return;
    // So is this, with the load in add_activated(): a thread publishes its sleep and then polls, the caller activates
    // the group and then reads whether that thread sleeps (Doorbell).
    ActiveGroup* first = activated_.load(std::memory_order_relaxed);
    do {
      group.next_ = first;
    } while (!activated_.compare_exchange_weak(first, &group));
  }

  // Under the engine's lock:
  /// Once in a poll, before first(): adds the activated groups, and drops those that are idle.
  void update() noexcept;
  /// Drops a group that has nothing in flight, and will not have any more.
  void remove(ActiveGroup& group) noexcept;
  /// The groups, all of type Group, in no order; null: no more.
  template <class Group>
  Group* first() const noexcept {
    return static_cast<Group*>(first_);
  }
  template <class Group>
  static Group* after(const Group& group) noexcept {
    return static_cast<Group*>(static_cast<const ActiveGroup&>(group).next_);
  }

 private:
  void add_activated() noexcept;

  std::atomic<ActiveGroup*> activated_{nullptr};  ///< a stack
  ActiveGroup* first_ = nullptr;
};

}  // namespace tessera::comm
