#include "tessera/comm/core/active_groups.h"

namespace tessera::comm {

void ActiveGroups::add_activated() noexcept {
  if (activated_.load() == nullptr) return;
  ActiveGroup* group = activated_.exchange(nullptr);
  while (group != nullptr) {
    ActiveGroup* const next = group->next_;
    group->idle_polls_ = 0;
    group->next_ = first_;
    first_ = group;
    group = next;
  }
}

void ActiveGroups::update() noexcept {
  add_activated();
  for (ActiveGroup** at = &first_; *at != nullptr;) {
    ActiveGroup& group = **at;
    group.idle_polls_ = group.any_in_flight() ? 0 : group.idle_polls_ + 1;
    if (group.idle_polls_ <= kIdlePolls) {
      at = &group.next_;
      continue;
    }
    ActiveGroup* const next = group.next_;  // once it is not listed, another thread may write it
    group.listed_.store(false);
    if (group.any_in_flight() && !group.listed_.exchange(true)) {  // begun meanwhile, by a thread that saw it listed
      group.idle_polls_ = 0;
      at = &group.next_;
    } else {
      *at = next;
    }
  }
}

void ActiveGroups::remove(ActiveGroup& group) noexcept {
  add_activated();
  for (ActiveGroup** at = &first_; *at != nullptr; at = &(*at)->next_)
    if (*at == &group) {
      *at = group.next_;
      break;
    }
  group.listed_.store(false);
}

}  // namespace tessera::comm
