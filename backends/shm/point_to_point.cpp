#include "backends/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"

namespace tessera::comm::shm {
namespace {

constexpr std::uint64_t kMessageTiles = 2;
constexpr std::uint64_t kMessageTile = 64 * 1024;

constexpr std::uint64_t kCmaRounds = 8;  ///< at once: each system call has a cost

std::uint64_t rounds_of_bytes(std::size_t bytes) { return (bytes + kMessageTile - 1) / kMessageTile; }

/// Throws Mismatch unless the receive takes what was sent. `message`: its number, 0 if it is not known any more.
void check(int peer, std::uint64_t message, const View& out, std::size_t bytes, DType dtype) {
  if (bytes == out.bytes() && dtype == out.dtype) return;
  throw Mismatch("recv " + (message == 0 ? "" : "#" + std::to_string(message) + " ") + "from rank " +
                 std::to_string(peer) + ": the sender passed " + std::to_string(bytes / size_of(dtype)) +
                 " elements of " + std::string(name_of(dtype)) + ", expected " + std::to_string(out.count) + " of " +
                 std::string(name_of(out.dtype)));
}

}  // namespace

PointToPoint::PointToPoint(ShmGroup& group, const MemberBlocks& members)
    : group_(group),
      members_(members),
      stores_(members.runtime().has_own_cores()),
      sends_(static_cast<std::size_t>(members.size())),
      receives_(static_cast<std::size_t>(members.size())) {}

void PointToPoint::push(ShmOperation& op) {
  ++in_flight_;
  if (op.call.kind == OpKind::recv && op.call.root == kAnyRank) return from_any_.push(op);
  const auto peer = static_cast<std::size_t>(op.call.root);
  (op.call.kind == OpKind::send ? sends_[peer].queue : receives_[peer].posted).push(op);
}

bool PointToPoint::advance() {
  bool moved = false;
  for (int k = 0; k < members_.size() && !group_.failed(); ++k) {
    if (k == members_.rank()) continue;
    while (advance_send(k)) moved = true;
    if (early_ > 0) moved |= deliver_early(k);
    while (!group_.failed() && advance_receive(k)) moved = true;
  }
  return moved;
}

void PointToPoint::complete(ShmOperation& op) noexcept {
  --in_flight_;
  group_.complete(op, Operation::succeeded);
}

void PointToPoint::fail_all() noexcept {
  const auto fail = [this](OperationQueue<ShmOperation>& queue) {
    while (!queue.empty()) group_.complete(queue.pop(), Operation::failed);
  };
  for (SendChannel& channel : sends_) fail(channel.queue);
  for (ReceiveChannel& channel : receives_) {
    fail(channel.running);
    fail(channel.posted);
    channel.early.clear();
  }
  fail(from_any_);
  in_flight_ = early_ = 0;
}

void PointToPoint::retire(ShmRuntime::RetiredBlock& retired) {
  for (SendChannel& channel : sends_)
    if (channel.tiles) retired.message_tiles.push_back(std::move(channel.tiles));
}

bool PointToPoint::awaits_peer(const ShmOperation& op, int peer) const {
  const auto at = static_cast<std::size_t>(peer);
  const ControlBlock& theirs = members_.of(peer);
  if (op.call.kind == OpKind::recv)
    return (theirs.sends(members_.rank()).sent.load() >> kRoundBits) <= receives_[at].messages;
  return rounds_of(theirs.received(members_.rank()).load(), sends_[at].messages) != kAllRounds;
}

/// Announces the first message of the channel.
void PointToPoint::begin_send(int peer, SendChannel& channel) {
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
  slot.tag = op.call.tag;
  slot.in_offset = op.stages_in ? kViaTiles : (op.cma_in ? kViaCma : runtime.arena().offset_of(in.data));
  slot.stage_offset = channel.tiles ? runtime.staging().offset_of(channel.tiles.data()) : 0;
  slot.cma = static_cast<const std::byte*>(in.data);
  slot.sent.store(encode(channel.messages, op.stages_in ? 0 : kAllRounds));
  members_.ring(peer);
}

bool PointToPoint::advance_send(int peer) {
  SendChannel& channel = sends_[static_cast<std::size_t>(peer)];
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
    const std::size_t bytes = std::min<std::size_t>(kMessageTile, in.bytes() - begin);
    stores_.write(StoreChoice::Target::tile, in.bytes(), bytes, [&](bool streams) {
      copy_bytes(channel.tiles.bytes_at(channel.rounds % kMessageTiles * kMessageTile),
                 static_cast<const std::byte*>(in.data) + begin, bytes, streams);
    });
    ++channel.rounds;
    members_.own().sends(peer).sent.store(encode(channel.messages, channel.rounds));
    members_.ring(peer);
    return true;
  }
  // Memory sent through tiles is free once it is copied; a window once the peer has read it.
  if (!op.stages_in && taken != kAllRounds) return false;
  if (group_.adopt_peer_failure()) return true;
  members_.count_sent(op, peer, in.bytes());
  channel.running = false;
  complete(channel.queue.pop());
  return true;
}

/// Takes the receive of a message from `peer`: the first of its tag, else the first from any rank. Null: none is
/// posted.
ShmOperation* PointToPoint::take_posted(int peer, std::int32_t tag) {
  for (OperationQueue<ShmOperation>* queue : {&receives_[static_cast<std::size_t>(peer)].posted, &from_any_})
    for (ShmOperation* op = queue->front(); op != nullptr; op = queue->after(*op))
      if (op->call.tag == tag) {
        queue->remove(*op);
        op->call.root = peer;
        if (op->call.source != nullptr) *op->call.source = peer;
        return op;
      }
  return nullptr;
}

/// A message has come that is to be read.
bool PointToPoint::begin_receive(int peer, ReceiveChannel& channel) {
  const SendSlot& slot = members_.of(peer).sends(members_.rank());
  if (ShmOperation* const op = take_posted(peer, slot.tag)) {
    channel.running.push(*op);
    check(peer, channel.messages + 1, op->call.out, slot.bytes, slot.dtype);
    channel.to = static_cast<std::byte*>(op->call.out.data);
  } else {
    if (channel.posted.empty() && from_any_.empty()) return false;  // it stays where it is
    EarlyMessage& early = channel.early.emplace_back(EarlyMessage{slot.tag, slot.dtype, {}, {}});
    early.data.resize(slot.bytes);
    early.counted = {members_.memory_tracker(), MemoryCategory::communication, early.data.size()};
    channel.to = early.data.data();
    channel.reads_early = true;
    ++early_;
  }
  channel.rounds = 0;
  return true;
}

bool PointToPoint::advance_receive(int peer) {
  ReceiveChannel& channel = receives_[static_cast<std::size_t>(peer)];
  const bool reads = channel.reads_early || !channel.running.empty();
  if (!reads && channel.posted.empty() && from_any_.empty()) return false;
  const SendSlot& slot = members_.of(peer).sends(members_.rank());
  const std::uint64_t message = channel.messages + 1;
  const std::uint64_t sent = slot.sent.load();
  if ((sent >> kRoundBits) < message) return false;
  if (!reads && !begin_receive(peer, channel)) return false;
  const std::size_t total = slot.bytes;
  const std::uint64_t rounds = rounds_of_bytes(total);
  if (channel.rounds < rounds) {
    if (rounds_of(sent, message) <= channel.rounds) return false;
    const std::size_t begin = channel.rounds * kMessageTile;
    const bool cma = slot.in_offset == kViaCma;
    const std::uint64_t until = std::min(rounds, channel.rounds + (cma ? kCmaRounds : 1));
    const std::size_t bytes = std::min<std::size_t>((until - channel.rounds) * kMessageTile, total - begin);
    std::byte* to = channel.to + begin;
    if (cma) {
      if (!members_.read(peer, slot.cma + begin, to, bytes))
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
  if (all) end_receive(peer, channel);
  return true;
}

void PointToPoint::end_receive(int peer, ReceiveChannel& channel) {
  ++channel.messages;
  if (!std::exchange(channel.reads_early, false)) return complete(channel.running.pop());
  deliver_early(peer);  // before the next message, which may have the same tag
}

/// Passes messages that have been read early to receives that were posted since then.
bool PointToPoint::deliver_early(int peer) {
  ReceiveChannel& channel = receives_[static_cast<std::size_t>(peer)];
  bool moved = false;
  for (std::size_t i = 0; i + (channel.reads_early ? 1 : 0) < channel.early.size();) {
    const EarlyMessage& early = channel.early[i];
    ShmOperation* const op = take_posted(peer, early.tag);
    if (op == nullptr) {
      ++i;
      continue;
    }
    const View& out = op->call.out;
    channel.running.push(*op);  // where fail_all() finds it if the sizes differ
    check(peer, 0, out, early.data.size(), early.dtype);
    channel.running.remove(*op);
    if (!early.data.empty()) std::memcpy(out.data, early.data.data(), early.data.size());
    channel.early.erase(channel.early.begin() + static_cast<std::ptrdiff_t>(i));
    --early_;
    complete(*op);
    moved = true;
  }
  return moved;
}

}  // namespace tessera::comm::shm
