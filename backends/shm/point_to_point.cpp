// Messages between two ranks: a channel for each pair and direction, independent of everything else.
#include <algorithm>

#include "backends/shm/shm_group.h"
#include "tessera/base/error.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::shm {
namespace {

constexpr std::uint64_t kMessageTiles = 2;
constexpr std::uint64_t kMessageTile = 64 * 1024;

constexpr std::uint64_t kRemoteRounds = 8;  ///< at once: each system call has a cost

std::uint64_t rounds_of_bytes(std::size_t bytes) { return (bytes + kMessageTile - 1) / kMessageTile; }

}  // namespace

bool ShmGroup::advance_messages() {
  bool moved = false;
  for (int k = 0; k < size_ && !failed_.load(); ++k) {
    if (k == rank_) continue;
    while (advance_send(k)) moved = true;
    while (!failed_.load() && advance_receive(k)) moved = true;
  }
  return moved;
}

bool ShmGroup::advance_send(int peer) {
  MessageChannel& channel = sends_[static_cast<std::size_t>(peer)];
  if (channel.queue.empty()) return false;
  ShmOperation& op = *channel.queue.head;
  const ConstView& in = op.call.in;
  SendSlot& line = own().sends(peer);
  const std::uint64_t received = port(peer).received(rank_).load();
  if (!channel.running) {
    if (channel.messages > 0 && rounds_of(received, channel.messages) != kAllRounds)
      return false;  // the previous message is still being read
    ++channel.messages;
    channel.rounds = 0;
    channel.running = true;
    const bool ordinary = !host_->arena().mapping()->holds(in.data, in.bytes());
    // A message that fits into the tiles is complete before its receive begins.
    op.remote_in = ordinary && host_->reads_remote() && in.bytes() > kMessageTiles * kMessageTile;
    op.stages_in = ordinary && !op.remote_in;
    if (op.stages_in && in.bytes() > 0 && !channel.tiles)
      channel.tiles =
          host_->staging().allocate(kMessageTiles * kMessageTile, MemoryCategory::communication, memory_tracker_);
    line.bytes = in.bytes();
    line.dtype = in.dtype;
    line.in_offset = op.stages_in ? kStaged : (op.remote_in ? kRemote : host_->arena().offset_of(in.data));
    line.stage_offset = channel.tiles ? host_->staging().offset_of(channel.tiles.data()) : 0;
    line.remote = static_cast<const std::byte*>(in.data);
    line.sent.store(encode(channel.messages, op.stages_in ? 0 : kAllRounds));
    ring(board(peer).bell);
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
    line.sent.store(encode(channel.messages, channel.rounds));
    ring(board(peer).bell);
    return true;
  }
  // Memory sent through tiles is free once it is copied; a window once the peer has read it.
  if (!op.stages_in && taken != kAllRounds) return false;
  if (!op.stages_in && adopt_peer_failure()) return true;
  count_sent(op, peer, in.bytes());
  channel.running = false;
  channel.queue.pop();
  --messages_waiting_;
  complete(op, ShmOperation::kGood);
  return true;
}

bool ShmGroup::advance_receive(int peer) {
  MessageChannel& channel = receives_[static_cast<std::size_t>(peer)];
  if (channel.queue.empty()) return false;
  ShmOperation& op = *channel.queue.head;
  const View& out = op.call.out;
  const SendSlot& line = port(peer).sends(rank_);
  const std::uint64_t message = channel.messages + 1;
  const std::uint64_t sent = line.sent.load();
  if ((sent >> kRoundBits) < message) return false;
  if (!channel.running) {
    if (line.bytes != out.bytes() || line.dtype != out.dtype)
      throw Mismatch("recv #" + std::to_string(message) + " from rank " + std::to_string(peer) + ": sent were " +
                     std::to_string(line.bytes / size_of(line.dtype)) + " elements of " +
                     std::string(name_of(line.dtype)) + ", expected " + std::to_string(out.count) + " of " +
                     std::string(name_of(out.dtype)));
    channel.running = true;
    channel.rounds = 0;
  }
  const std::uint64_t rounds = rounds_of_bytes(out.bytes());
  if (channel.rounds < rounds) {
    if (rounds_of(sent, message) <= channel.rounds) return false;
    const std::size_t begin = channel.rounds * kMessageTile;
    const bool remote = line.in_offset == kRemote;
    const std::uint64_t until = std::min(rounds, channel.rounds + (remote ? kRemoteRounds : 1));
    const std::size_t bytes = std::min<std::size_t>((until - channel.rounds) * kMessageTile, out.bytes() - begin);
    std::byte* to = static_cast<std::byte*>(out.data) + begin;
    if (remote) {
      if (!read_remote(board(peer).pid.load(), line.remote + begin, to, bytes))
        return false;  // the peer died: the thread that watches the ranks reports it
    } else {
      copy_bytes(to,
                 line.in_offset == kStaged
                     ? staging_of(peer) + line.stage_offset + channel.rounds % kMessageTiles * kMessageTile
                     : window_of(peer) + line.in_offset + begin,
                 bytes, false);
    }
    channel.rounds = until;
  }
  const bool all = channel.rounds == rounds;
  if (all && line.in_offset != kStaged && adopt_peer_failure()) return true;
  own().received(peer).store(encode(message, all ? kAllRounds : channel.rounds));
  ring(board(peer).bell);
  if (!all) return true;
  channel.messages = message;
  channel.running = false;
  channel.queue.pop();
  --messages_waiting_;
  complete(op, ShmOperation::kGood);
  return true;
}

}  // namespace tessera::comm::shm
