// One operation in flight on one rank: what was called, its number and deadline, and how it ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm {

class GroupCore;

/// The part that all backends share. A group owns its operations and reuses them.
class TESSERA_API Operation : public WorkState {
 public:
  enum State : std::uint32_t { pending, succeeded, failed };

  Operation() = default;
  ~Operation() override;
  /// Prepares it for another call; `number` counts the collectives of the group, or the messages between two ranks.
  void reset(const OpDesc& what, std::uint64_t number) {
    call = what;
    call.in_counts = {};
    call.out_counts = {};
    sequence = number;
    deadline.store(Clock::time_point::max(), std::memory_order_relaxed);
    state.store(pending, std::memory_order_relaxed);  // no other thread sees it before its submission
    internal = small = false;
    batch = nullptr;
    batch_remaining = 0;
  }

  bool done() noexcept final;
  bool wait_until(Clock::time_point until) final;
  void wait() final;
  void on_done(WorkCallback callback) final;
  /// Its name in errors: "all_reduce #12 (layer.3)".
  virtual std::string format() const;

  bool is_message() const noexcept { return comm::is_message(call.kind); }
  void start_deadline() noexcept { deadline.store(Clock::now() + call.timeout, std::memory_order_relaxed); }
  bool is_late(Clock::time_point now) const noexcept { return now >= deadline.load(std::memory_order_relaxed); }

  std::shared_ptr<GroupCore> group;  ///< from the launch until the last handle is gone
  OpDesc call;                       ///< without the counts of the _v forms
  std::uint64_t sequence = 0;
  /// Not set until an operation outlasts its call: most do not, and reading the clock takes a tenth of a small call.
  std::atomic<Clock::time_point> deadline{Clock::time_point::max()};
  std::atomic<std::uint32_t> state{pending};  ///< a State; the type is that of ProgressEngine::wait()
  bool internal = false;                      ///< of the library itself: not counted in the traffic
  bool small = false;                         ///< may complete inside its call
  Operation* batch = nullptr;                 ///< of which this is a part
  std::uint32_t batch_remaining = 0;          ///< parts in flight, if this is a batch
  std::vector<WorkCallback> callbacks;        ///< of a pending operation; guarded by the group
  Operation* next = nullptr;                  ///< link of an OperationQueue or of the free operations

 protected:
  void recycle() noexcept override;

 private:
  bool has_failed() const noexcept;
};

/// A queue of operations, linked through them.
template <class T>
class OperationQueue {
 public:
  bool empty() const noexcept { return head_ == nullptr; }
  T* front() const noexcept { return head_; }
  static T* after(const T& op) noexcept { return static_cast<T*>(op.next); }
  void push(T& op) noexcept {
    op.next = nullptr;
    if (tail_ == nullptr)
      head_ = &op;
    else
      tail_->next = &op;
    tail_ = &op;
  }
  /// Takes an operation that is in the queue out of it.
  void remove(T& op) noexcept {
    if (head_ == &op) {
      pop();
      return;
    }
    T* before = head_;
    while (after(*before) != &op) before = after(*before);
    before->next = op.next;
    if (tail_ == &op) tail_ = before;
  }
  T& pop() noexcept {
    T& first = *head_;
    head_ = after(first);
    if (head_ == nullptr) tail_ = nullptr;
    return first;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
};

}  // namespace tessera::comm
