#include "backends/tcp/receive_queue.h"

#include <algorithm>
#include <cstring>

#include "backends/tcp/send_queue.h"

namespace tessera::comm::tcp {

InboundMessage& ReceiveQueue::entry(const MessageTag& tag) {
  InboundMessage& inbound = pool_.take();
  inbound.tag = tag;
  inbound.cancelled = given_up_.has(tag);
  table_.insert(inbound);
  return inbound;
}

void ReceiveQueue::forget(InboundMessage& inbound) noexcept {
  table_.erase(inbound);
  pool_.give(inbound);
}

void ReceiveQueue::release_storage(InboundMessage& inbound) noexcept {
  if (inbound.storage != nullptr) buffers_.give(inbound.storage, inbound.total);
  inbound.storage = nullptr;
}

void ReceiveQueue::ask(InboundMessage& inbound) {
  inbound.asked = true;
  outbox_.tell(FrameKind::ready, inbound.tag);
}

void ReceiveQueue::receive(Message& message) {
  InboundMessage* inbound = table_.find(message.tag);
  if (inbound == nullptr) inbound = &entry(message.tag);
  inbound->message = &message;
  message.handle = inbound;
  if (inbound->complete) return finish(*inbound);
  if (!inbound->eager && (inbound->announced || message.bytes > kEagerLimit)) ask(*inbound);
}

void ReceiveQueue::cancel(Message& message) noexcept {
  auto& inbound = *static_cast<InboundMessage*>(message.handle);
  inbound.message = nullptr;
  inbound.cancelled = true;  // the entry stays, so that later data finds it and is discarded
  release_storage(inbound);
}

/// A message in transit needs its entry; entry() handles messages that start later. A message that was only announced
/// is never requested, so it doesn't arrive.
void ReceiveQueue::discard_communicator(std::uint32_t communicator) {
  given_up_.add(communicator);
  for (InboundMessage* inbound : table_.of(communicator)) {
    if (inbound->message != nullptr) continue;
    inbound->cancelled = true;
    release_storage(*inbound);
    if (inbound->complete)
      finish(*inbound);
    else if (!inbound->known && !inbound->asked)
      forget(*inbound);
  }
}

std::string_view ReceiveQueue::frame_begins(const Frame& frame, InboundMessage*& target) {
  if (!outbox_.note_consumed(frame.consumed)) return "a credit for more than was sent";
  switch (frame.kind) {
    case FrameKind::eager:
      return begin_eager(frame, target);
    case FrameKind::piece:
      return begin_piece(frame, target);
    case FrameKind::announce:
      return note_announce(frame);
    case FrameKind::ready:
      return outbox_.note_ready(frame.tag) ? "" : "two CTS for one message";
    case FrameKind::bye:
    case FrameKind::credit:
      return "";
  }
  return "";
}

std::string_view ReceiveQueue::begin_eager(const Frame& frame, InboundMessage*& target) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr) inbound = &entry(frame.tag);
  if (inbound->known || inbound->announced) return "a message that was already received";
  if (held_ + eager_cost(frame.total) > kCredit) return "more eager messages than its credit allows";
  held_ += eager_cost(frame.total);
  inbound->known = inbound->eager = true;
  inbound->total = inbound->begun = frame.total;
  if (inbound->message == nullptr && !inbound->cancelled && frame.total > 0)
    inbound->storage = buffers_.take(frame.total);
  target = inbound;
  return "";
}

std::string_view ReceiveQueue::begin_piece(const Frame& frame, InboundMessage*& target) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr || !inbound->asked || inbound->eager || inbound->complete)
    return "a chunk of a message that was not requested";
  if (inbound->known && inbound->total != frame.total) return "chunks with different lengths of their message";
  if (frame.length > frame.total - inbound->begun) return "more bytes than the message has";
  inbound->known = true;
  inbound->total = frame.total;
  inbound->begun += frame.length;
  inbound->announce_due |= frame.announced != 0;
  target = inbound;
  return "";
}

std::string_view ReceiveQueue::note_announce(const Frame& frame) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr && given_up_.has(frame.tag)) return "";
  if (inbound == nullptr) inbound = &entry(frame.tag);
  if (inbound->announced || inbound->eager) return "two RTS for one message";
  inbound->announced = true;
  ++announcements_;
  if (inbound->complete)  // the message overtook its announcement
    forget(*inbound);
  else if (inbound->message != nullptr && !inbound->asked)
    ask(*inbound);
  return "";
}

std::span<std::byte> ReceiveQueue::room_for(InboundMessage& target, std::size_t offset, std::size_t bytes) {
  if (target.storage != nullptr) return {target.storage + offset, bytes};
  if (target.message != nullptr && offset < target.message->bytes)
    return {target.message->data + offset, std::min(bytes, target.message->bytes - offset)};
  return {trash_.data(), std::min(bytes, trash_.size())};
}

void ReceiveQueue::frame_ends(InboundMessage& target, std::size_t bytes) {
  target.arrived += bytes;
  if (target.arrived < target.total) return;
  target.complete = true;
  if (target.message != nullptr || target.cancelled) finish(target);
}

/// The message is complete, and received or cancelled.
void ReceiveQueue::finish(InboundMessage& inbound) {
  Message* const message = inbound.message;
  const std::size_t total = inbound.total;
  if (inbound.storage != nullptr && message != nullptr && message->bytes > 0)
    std::memcpy(message->data, inbound.storage, std::min(total, message->bytes));
  release_storage(inbound);
  if (inbound.eager) {
    held_ -= eager_cost(total);
    outbox_.add_consumed(eager_cost(total));
  }
  if (inbound.announce_due && !inbound.announced)
    inbound.message = nullptr;  // note_announce() forgets it
  else
    forget(inbound);
  if (message == nullptr) return;
  message->state = kIdle;
  message->owner->message_done(*message, total);
}

}  // namespace tessera::comm::tcp
