#include "backends/tcp/send_queue.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

namespace tessera::comm::tcp {
namespace {

constexpr std::size_t kMinChunk = 128 << 10;

/// Divides a message evenly over the connections, in frames of at least kMinChunk.
std::size_t chunk_size(std::size_t bytes, std::size_t connections) {
  return std::clamp((bytes + connections - 1) / connections, kMinChunk, kMaxChunk);
}

}  // namespace

void SendQueue::send(Message& message) {
  const std::uint64_t cost = eager_cost(message.bytes);
  const bool eager = message.bytes <= kEagerLimit && in_flight() + cost <= kCredit;
  OutboundMessage* outbound = eager || table_.size() == 0 ? nullptr : table_.find(message.tag);
  const bool cts_received = outbound != nullptr;
  if (!cts_received) outbound = &pool_.acquire();
  message.handle = outbound;
  outbound->tag = message.tag;
  outbound->message = &message;
  outbound->data = message.data;
  outbound->bytes = message.bytes;
  if (eager) {
    eager_sent_ += cost;
    outbound->eager = true;
    outbound->state = OutboundMessage::State::queued;
    eager_.push_back(*outbound);
  } else if (cts_received) {
    table_.erase(*outbound);
    start(*outbound);
  } else {
    outbound->state = OutboundMessage::State::waiting;
    table_.insert(*outbound);
    rts_pending_.push_back(*outbound);
    if (message.bytes <= kEagerLimit) send_rts(*outbound);  // such a receive sends no request by itself
  }
}

void SendQueue::start(OutboundMessage& outbound) {
  outbound.state = OutboundMessage::State::queued;
  bulk_.push_back(outbound);
}

void SendQueue::send_rts(OutboundMessage& outbound) {
  queue_control(FrameKind::rts, outbound.tag);
  outbound.rts_sent = true;
  rts_pending_.erase(Queue::s_iterator_to(outbound));
}

void SendQueue::send_pending_rts() {
  while (!rts_pending_.empty()) send_rts(rts_pending_.front());
}

void SendQueue::queue_control(FrameKind kind, const MessageTag& tag) {
  if (control_.full()) control_.set_capacity(2 * control_.capacity());
  control_.push_back({kind, tag});
}

bool SendQueue::on_cts(const MessageTag& tag) {
  OutboundMessage* outbound = table_.find(tag);
  if (outbound == nullptr && discarded_.has(tag)) return true;
  if (outbound == nullptr) {
    outbound = &pool_.acquire();
    outbound->tag = tag;
    table_.insert(*outbound);
    return true;
  }
  if (outbound->state == OutboundMessage::State::expected) return false;
  table_.erase(*outbound);
  if (!outbound->rts_sent) rts_pending_.erase(Queue::s_iterator_to(*outbound));
  start(*outbound);
  return true;
}

bool SendQueue::on_consumed(std::uint64_t cost) noexcept {
  if (cost > eager_sent_) return false;
  eager_consumed_ = std::max(eager_consumed_, cost);  // frames of different connections may be reordered
  return true;
}

void SendQueue::add_consumed(std::uint64_t cost) {
  consumed_ += cost;
  if (consumed_ - reported_ < kCredit / 2 || credit_queued_) return;
  credit_queued_ = true;
  queue_control(FrameKind::credit, {});
}

bool SendQueue::cancel(Message& message) noexcept {
  auto& outbound = *static_cast<OutboundMessage*>(message.handle);
  const bool untouched = outbound.state == OutboundMessage::State::waiting ||
                         (outbound.state == OutboundMessage::State::queued && outbound.handed == 0);
  if (untouched) {
    if (outbound.state == OutboundMessage::State::waiting) {
      table_.erase(outbound);
      if (!outbound.rts_sent) rts_pending_.erase(Queue::s_iterator_to(outbound));
    } else if (outbound.eager) {
      eager_sent_ -= eager_cost(outbound.bytes);
      eager_.erase(Queue::s_iterator_to(outbound));
    } else {
      bulk_.erase(Queue::s_iterator_to(outbound));
    }
    pool_.release(outbound);
    return true;
  }
  std::size_t first = outbound.handed;
  for (const Slot& slot : slots_)
    if (slot.active && slot.source == &outbound)
      first = std::min(first, slot.frame.offset + std::max(slot.done, sizeof(Frame)) - sizeof(Frame));
  const std::size_t left = outbound.bytes - first;
  outbound.message = nullptr;
  if (left > 0) {
    outbound.own.reset(new (std::nothrow) std::byte[left]);
    if (outbound.own == nullptr) return false;
    std::memcpy(outbound.own.get(), outbound.data + first, left);
  }
  outbound.data = outbound.own.get();
  outbound.first = first;
  return true;
}

void SendQueue::discard_communicator(std::uint32_t communicator) {
  discarded_.add(communicator);
  for (OutboundMessage* outbound : table_.of(communicator)) {
    if (outbound->state != OutboundMessage::State::expected) continue;
    table_.erase(*outbound);
    pool_.release(*outbound);
  }
}

bool SendQueue::has_work(std::size_t connection) const noexcept {
  const Slot& slot = slots_[connection];
  return slot.active || !bulk_.empty() || (connection == 0 && (!control_.empty() || !eager_.empty())) ||
         (closing_ && !slot.close_sent);
}

void SendQueue::prepare_frame(Frame& frame, OutboundMessage& source) {
  frame.kind = source.eager ? FrameKind::eager : FrameKind::data;
  frame.tag = source.tag;
  frame.rts_sent = source.rts_sent ? 1 : 0;
  frame.total = source.bytes;
  frame.offset = source.handed;
  const std::size_t left = source.bytes - source.handed;
  frame.length =
      static_cast<std::uint32_t>(source.eager ? left : std::min(left, chunk_size(source.bytes, slots_.size())));
  source.handed += frame.length;
  if (source.handed < source.bytes) return;
  source.state = OutboundMessage::State::handed;
  (source.eager ? eager_ : bulk_).erase(Queue::s_iterator_to(source));
}

void SendQueue::seal(std::size_t connection) {
  FrameSeal& seal = seals_[connection];
  Frame& frame = slots_[connection].frame;
  const OutboundMessage* const source = slots_[connection].source;
  if (seal.payloads() && source != nullptr)
    frame.payload_code = seal.payload_code({source->data + (frame.offset - source->first), frame.length});
  frame.header_code = seal.header_code(frame);
  seal.next_frame();
}

bool SendQueue::fill(std::size_t connection) {
  Slot& slot = slots_[connection];
  if (!has_work(connection)) return false;
  slot.frame = {};
  slot.source = nullptr;
  slot.done = 0;
  slot.active = true;
  if (connection == 0 && !control_.empty()) {
    slot.frame.kind = control_.front().kind;
    slot.frame.tag = control_.front().tag;
    control_.pop_front();
    if (slot.frame.kind == FrameKind::credit) credit_queued_ = false;
  } else if ((connection == 0 && !eager_.empty()) || !bulk_.empty()) {
    slot.source = connection == 0 && !eager_.empty() ? &eager_.front() : &bulk_.front();
    prepare_frame(slot.frame, *slot.source);
  } else {
    slot.frame.kind = FrameKind::close;
    slot.close_sent = true;
  }
  slot.frame.consumed = reported_ = consumed_;
  seal(connection);
  return true;
}

bool SendQueue::next(std::size_t connection, Buffers& buffers) {
  Slot& slot = slots_[connection];
  if (!slot.active && !fill(connection)) return false;
  const auto header = std::as_bytes(std::span(&slot.frame, 1));
  buffers[0] = header.subspan(std::min(slot.done, sizeof(Frame)));
  const std::size_t payload_done = std::max(slot.done, sizeof(Frame)) - sizeof(Frame);
  buffers[1] = {};
  if (slot.source != nullptr && slot.frame.length > payload_done)
    buffers[1] = {slot.source->data + (slot.frame.offset + payload_done - slot.source->first),
                  slot.frame.length - payload_done};
  return true;
}

void SendQueue::wrote(std::size_t connection, std::size_t bytes) {
  Slot& slot = slots_[connection];
  const std::size_t before = std::max(slot.done, sizeof(Frame));
  slot.done += bytes;
  const std::size_t payload = std::max(slot.done, sizeof(Frame)) - before;
  OutboundMessage* const source = slot.source;
  if (source != nullptr) {
    source->written += payload;
    if (source->message != nullptr && source->message->sent != nullptr)
      source->message->sent->fetch_add(payload, std::memory_order_relaxed);
  }
  if (slot.done < sizeof(Frame) + slot.frame.length) return;
  slot.active = false;
  if (source == nullptr || source->state != OutboundMessage::State::handed || source->written < source->bytes) return;
  Message* const message = source->message;
  pool_.release(*source);
  if (message == nullptr) return;
  message->state = kIdle;
  message->owner->message_done(*message, message->bytes);
}

}  // namespace tessera::comm::tcp
