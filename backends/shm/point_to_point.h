// Messages between two ranks: a channel for each pair and direction, independent of everything else. It carries one
// message at a time. If no receive awaits the tag of the next one, and receives of other tags do wait, it is read into
// memory of its own, so that they get theirs.
#pragma once

#include <deque>
#include <vector>

#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"
#include "tessera/base/memory_tracker.h"

namespace tessera::comm::shm {

class ShmGroup;

class PointToPoint {
  struct SendChannel {
    OperationQueue<ShmOperation> queue;  ///< the first one is being sent if `running`
    std::uint64_t messages = 0;          ///< begun
    std::uint64_t rounds = 0;
    bool running = false;
    Buffer tiles;
  };
  /// A message that no receive awaited when receives of other tags were posted. It was taken out of their way.
  struct EarlyMessage {
    std::int32_t tag = 0;
    DType dtype = DType::f32;
    std::vector<std::byte> data;
    base::TrackedBytes counted;
  };
  struct ReceiveChannel {
    OperationQueue<ShmOperation> posted;
    OperationQueue<ShmOperation> running;  ///< at most one: the receive of the message that is being read
    std::deque<EarlyMessage> early;        ///< the last one is being read if `reads_early`
    bool reads_early = false;
    std::uint64_t messages = 0;  ///< read
    std::uint64_t rounds = 0;    ///< of the message that is being read
    std::byte* to = nullptr;     ///< where it goes
  };

 public:
  PointToPoint(ShmGroup& group, const MemberBlocks& members);

  void push(ShmOperation& op);
  bool any() const noexcept { return in_flight_ > 0; }
  /// Moves all messages as far as possible. True: one progressed. Throws Mismatch.
  bool advance();
  /// Completes all messages as failed.
  void fail_all() noexcept;
  /// Hands over the memory from which peers may still read messages.
  void retire(ShmRuntime::RetiredBlock& retired);
  /// Whether `op` needs the peer to do something.
  bool awaits_peer(const ShmOperation& op, int peer) const;

  template <class Visitor>
  void for_each_queue(const Visitor& visit) const {
    for (const SendChannel& channel : sends_) visit(channel.queue);
    for (const ReceiveChannel& channel : receives_) {
      visit(channel.running);
      visit(channel.posted);
    }
    visit(from_any_);
  }

 private:
  bool advance_send(int peer);
  void begin_send(int peer, SendChannel& channel);
  bool advance_receive(int peer);
  bool begin_receive(int peer, ReceiveChannel& channel);
  void end_receive(int peer, ReceiveChannel& channel);
  bool deliver_early(int peer);
  ShmOperation* take_posted(int peer, std::int32_t tag);
  void complete(ShmOperation& op) noexcept;

  ShmGroup& group_;
  const MemberBlocks& members_;
  StoreChoice stores_;
  std::vector<SendChannel> sends_;
  std::vector<ReceiveChannel> receives_;
  OperationQueue<ShmOperation> from_any_;  ///< receives from any rank whose message has not come
  std::size_t early_ = 0;                  ///< messages, of all channels
  std::size_t in_flight_ = 0;
};

}  // namespace tessera::comm::shm
