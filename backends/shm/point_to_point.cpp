#include "backends/shm/point_to_point.h"

#include <algorithm>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::shm {
namespace {

constexpr std::uint64_t kMessageTiles = 2;
constexpr std::uint64_t kMessageTile = 64 * 1024;

constexpr std::uint64_t kCmaRounds = 8;  ///< at once: each system call has a cost

std::uint64_t rounds_of_bytes(std::size_t bytes) { return (bytes + kMessageTile - 1) / kMessageTile; }

}  // namespace

PointToPoint::PointToPoint(ShmGroup& group, const MemberBlocks& members)
    : group_(group),
      members_(members),
      sends_(static_cast<std::size_t>(members.size())),
      receives_(static_cast<std::size_t>(members.size())) {}

void PointToPoint::push(ShmOperation& op) {
  (op.call.kind == OpKind::send ? sends_ : receives_)[static_cast<std::size_t>(op.call.root)].queue.push(op);
  ++in_flight_;
}

bool PointToPoint::advance() {
  bool moved = false;
  for (int k = 0; k < members_.size() && !group_.failed(); ++k) {
    if (k == members_.rank()) continue;
    while (advance_send(k)) moved = true;
    while (!group_.failed() && advance_receive(k)) moved = true;
  }
  return moved;
}

void PointToPoint::complete_first(MessageChannel& channel) noexcept {
  channel.running = false;
  --in_flight_;
  group_.complete(channel.queue.pop(), Operation::succeeded);
}

void PointToPoint::fail_all() noexcept {
  for (std::vector<MessageChannel>* side : {&sends_, &receives_})
    for (MessageChannel& channel : *side)
      while (!channel.queue.empty()) group_.complete(channel.queue.pop(), Operation::failed);
  in_flight_ = 0;
}

bool PointToPoint::awaits_peer(const ShmOperation& op) const {
  const auto peer = static_cast<std::size_t>(op.call.root);
  const ControlBlock& theirs = members_.of(op.call.root);
  if (op.call.kind == OpKind::recv)
    return (theirs.sends(members_.rank()).sent.load() >> kRoundBits) <= receives_[peer].messages;
  return rounds_of(theirs.received(members_.rank()).load(), sends_[peer].messages) != kAllRounds;
}

/// Announces the first message of the channel.
void PointToPoint::begin_send(int peer, MessageChannel& channel) {
  ShmOperation& op = *channel.queue.front();
  const ConstView& in = op.call.in;
  ShmRuntime& runtime = members_.runtime();
  SendSlot& slot = members_.own().sends(peer);
  ++channel.messages;
  channel.rounds = 0;
  channel.running = true;
  const bool ordinary = !runtime.arena().mapping()->holds(in.data, in.bytes());
  // A message that fits into the tiles is complete before its receive begins.
  op.cma_in = ordinary && runtime.uses_cma() && in.bytes() > kMessageTiles * kMessageTile;
  op.stages_in = ordinary && !op.cma_in;
  if (op.stages_in && in.bytes() > 0 && !channel.tiles) channel.tiles = members_.allocate(kMessageTiles * kMessageTile);
  slot.bytes = in.bytes();
  slot.dtype = in.dtype;
  slot.in_offset = op.stages_in ? kViaTiles : (op.cma_in ? kViaCma : runtime.arena().offset_of(in.data));
  slot.stage_offset = channel.tiles ? runtime.staging().offset_of(channel.tiles.data()) : 0;
  slot.cma = static_cast<const std::byte*>(in.data);
  slot.sent.store(encode(channel.messages, op.stages_in ? 0 : kAllRounds));
  members_.ring(peer);
}

bool PointToPoint::advance_send(int peer) {
  MessageChannel& channel = sends_[static_cast<std::size_t>(peer)];
  if (channel.queue.empty()) return false;
  ShmOperation& op = *channel.queue.front();
  const ConstView& in = op.call.in;
  const std::uint64_t received = members_.of(peer).received(members_.rank()).load();
  if (!channel.running) {
    if (channel.messages > 0 && rounds_of(received, channel.messages) != kAllRounds)
      return false;  // the previous message is still being read
    begin_send(peer, channel);
    return true;
  }
  const std::uint64_t taken = rounds_of(received, channel.messages);
  if (op.stages_in && channel.rounds < rounds_of_bytes(in.bytes())) {
    if (channel.rounds >= taken + kMessageTiles) return false;
    const std::size_t begin = channel.rounds * kMessageTile;
    copy_bytes(channel.tiles.bytes_at(channel.rounds % kMessageTiles * kMessageTile),
               static_cast<const std::byte*>(in.data) + begin, std::min<std::size_t>(kMessageTile, in.bytes() - begin),
               false);
    ++channel.rounds;
    members_.own().sends(peer).sent.store(encode(channel.messages, channel.rounds));
    members_.ring(peer);
    return true;
  }
  // Memory sent through tiles is free once it is copied; a window once the peer has read it.
  if (!op.stages_in && taken != kAllRounds) return false;
  if (group_.adopt_peer_failure()) return true;
  members_.count_sent(op, peer, in.bytes());
  complete_first(channel);
  return true;
}

bool PointToPoint::advance_receive(int peer) {
  MessageChannel& channel = receives_[static_cast<std::size_t>(peer)];
  if (channel.queue.empty()) return false;
  const View& out = channel.queue.front()->call.out;
  const SendSlot& slot = members_.of(peer).sends(members_.rank());
  const std::uint64_t message = channel.messages + 1;
  const std::uint64_t sent = slot.sent.load();
  if ((sent >> kRoundBits) < message) return false;
  if (!channel.running) {
    if (slot.bytes != out.bytes() || slot.dtype != out.dtype)
      throw Mismatch("recv #" + std::to_string(message) + " from rank " + std::to_string(peer) +
                     ": the sender passed " + std::to_string(slot.bytes / size_of(slot.dtype)) + " elements of " +
                     std::string(name_of(slot.dtype)) + ", expected " + std::to_string(out.count) + " of " +
                     std::string(name_of(out.dtype)));
    channel.running = true;
    channel.rounds = 0;
  }
  const std::uint64_t rounds = rounds_of_bytes(out.bytes());
  if (channel.rounds < rounds) {
    if (rounds_of(sent, message) <= channel.rounds) return false;
    const std::size_t begin = channel.rounds * kMessageTile;
    const bool cma = slot.in_offset == kViaCma;
    const std::uint64_t until = std::min(rounds, channel.rounds + (cma ? kCmaRounds : 1));
    const std::size_t bytes = std::min<std::size_t>((until - channel.rounds) * kMessageTile, out.bytes() - begin);
    std::byte* to = static_cast<std::byte*>(out.data) + begin;
    if (cma) {
      if (!cma_read(members_.record(peer).pid.load(), slot.cma + begin, to, bytes))
        return false;  // the peer died: the thread that watches the ranks reports it
    } else {
      copy_bytes(to,
                 slot.in_offset == kViaTiles
                     ? members_.staging(peer) + slot.stage_offset + channel.rounds % kMessageTiles * kMessageTile
                     : members_.window(peer) + slot.in_offset + begin,
                 bytes, false);
    }
    channel.rounds = until;
  }
  const bool all = channel.rounds == rounds;
  if (all && group_.adopt_peer_failure()) return true;
  members_.own().received(peer).store(encode(message, all ? kAllRounds : channel.rounds));
  members_.ring(peer);
  if (!all) return true;
  channel.messages = message;
  complete_first(channel);
  return true;
}

}  // namespace tessera::comm::shm
