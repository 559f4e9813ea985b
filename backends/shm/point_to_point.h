// Messages between two ranks: a channel for each pair and direction, independent of everything else.
#pragma once

#include <vector>

#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"

namespace tessera::comm::shm {

class ShmGroup;

class PointToPoint {
  struct MessageChannel {  ///< messages to or from one peer
    OperationQueue<ShmOperation> queue;
    std::uint64_t messages = 0;  ///< begun
    std::uint64_t rounds = 0;
    bool running = false;
    Buffer tiles;
  };

 public:
  PointToPoint(ShmGroup& group, const MemberBlocks& members);

  void push(ShmOperation& op);
  bool any() const noexcept { return in_flight_ > 0; }
  /// Moves all messages as far as possible. True: one progressed. Throws Mismatch.
  bool advance();
  /// Completes all messages as failed.
  void fail_all() noexcept;
  /// Whether `op`, the first one of its channel, needs the peer to do something.
  bool awaits_peer(const ShmOperation& op) const;

  template <class Visitor>
  void for_each_queue(const Visitor& visit) const {
    for (const std::vector<MessageChannel>* side : {&sends_, &receives_})
      for (const MessageChannel& channel : *side) visit(channel.queue);
  }

 private:
  bool advance_send(int peer);
  void begin_send(int peer, MessageChannel& channel);
  bool advance_receive(int peer);
  void complete_first(MessageChannel& channel) noexcept;

  ShmGroup& group_;
  const MemberBlocks& members_;
  std::vector<MessageChannel> sends_;
  std::vector<MessageChannel> receives_;
  std::size_t in_flight_ = 0;
};

}  // namespace tessera::comm::shm
