#include "backends/tcp/receive_queue.h"

#include <algorithm>
#include <cstring>

#include "backends/tcp/send_queue.h"

namespace tessera::comm::tcp {

InboundMessage& ReceiveQueue::entry(const MessageTag& tag) {
  InboundMessage& inbound = pool_.acquire();
  inbound.tag = tag;
  inbound.cancelled = discarded_.has(tag);
  table_.insert(inbound);
  return inbound;
}

void ReceiveQueue::forget(InboundMessage& inbound) noexcept {
  table_.erase(inbound);
  pool_.release(inbound);
}

void ReceiveQueue::release_storage(InboundMessage& inbound) noexcept {
  if (inbound.storage != nullptr) buffers_.release(inbound.storage, inbound.total);
  inbound.storage = nullptr;
}

void ReceiveQueue::send_cts(InboundMessage& inbound) {
  inbound.cts_sent = true;
  send_queue_.queue_control(FrameKind::cts, inbound.tag);
}

void ReceiveQueue::receive(Message& message) {
  InboundMessage* inbound = table_.find(message.tag);
  if (inbound == nullptr) inbound = &entry(message.tag);
  inbound->message = &message;
  message.handle = inbound;
  if (inbound->complete) return finish(*inbound);
  if (!inbound->eager && (inbound->rts_received || message.bytes > kEagerLimit)) send_cts(*inbound);
}

bool ReceiveQueue::arrived(const MessageTag& tag) noexcept {
  const InboundMessage* const inbound = table_.find(tag);
  return inbound != nullptr && inbound->message == nullptr && !inbound->cancelled &&
         (inbound->known || inbound->rts_received);
}

void ReceiveQueue::cancel(Message& message) noexcept {
  auto& inbound = *static_cast<InboundMessage*>(message.handle);
  inbound.message = nullptr;
  inbound.cancelled = true;  // the entry stays, so that later data finds it and is discarded
  release_storage(inbound);
}

/// A message in transit needs its entry; entry() handles messages that start later. A message with only an RTS
/// is never requested, so it doesn't arrive.
void ReceiveQueue::discard_communicator(std::uint32_t communicator) {
  discarded_.add(communicator);
  for (InboundMessage* inbound : table_.of(communicator)) {
    if (inbound->message != nullptr) continue;
    inbound->cancelled = true;
    release_storage(*inbound);
    if (inbound->complete)
      finish(*inbound);
    else if (!inbound->known && !inbound->cts_sent)
      forget(*inbound);
  }
}

std::string_view ReceiveQueue::frame_begins(const Frame& frame, InboundMessage*& target) {
  if (!send_queue_.on_consumed(frame.consumed)) return "a credit for more than was sent";
  switch (frame.kind) {
    case FrameKind::eager:
      return begin_eager(frame, target);
    case FrameKind::data:
      return begin_data(frame, target);
    case FrameKind::rts:
      return on_rts(frame);
    case FrameKind::cts:
      return send_queue_.on_cts(frame.tag) ? "" : "two CTS for one message";
    case FrameKind::close:
    case FrameKind::credit:
      return "";
  }
  return "";
}

std::string_view ReceiveQueue::begin_eager(const Frame& frame, InboundMessage*& target) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr) inbound = &entry(frame.tag);
  if (inbound->known || inbound->rts_received) return "a message that was already received";
  if (held_ + eager_cost(frame.total) > kCredit) return "more eager messages than its credit allows";
  held_ += eager_cost(frame.total);
  inbound->known = inbound->eager = true;
  inbound->total = inbound->begun = frame.total;
  if (inbound->message == nullptr && !inbound->cancelled && frame.total > 0)
    inbound->storage = buffers_.acquire(frame.total);
  target = inbound;
  return "";
}

std::string_view ReceiveQueue::begin_data(const Frame& frame, InboundMessage*& target) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr || !inbound->cts_sent || inbound->eager || inbound->complete)
    return "a chunk of a message that was not requested";
  if (inbound->known && inbound->total != frame.total) return "chunks with different lengths of their message";
  if (frame.length > frame.total - inbound->begun) return "more bytes than the message has";
  inbound->known = true;
  inbound->total = frame.total;
  inbound->begun += frame.length;
  inbound->rts_due |= frame.rts_sent != 0;
  target = inbound;
  return "";
}

std::string_view ReceiveQueue::on_rts(const Frame& frame) {
  InboundMessage* inbound = table_.find(frame.tag);
  if (inbound == nullptr && discarded_.has(frame.tag)) return "";
  if (inbound == nullptr) inbound = &entry(frame.tag);
  if (inbound->rts_received || inbound->eager) return "two RTS for one message";
  inbound->rts_received = true;
  ++rts_count_;
  if (inbound->complete)  // the message overtook its RTS
    forget(*inbound);
  else if (inbound->message != nullptr && !inbound->cts_sent)
    send_cts(*inbound);
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
    send_queue_.add_consumed(eager_cost(total));
  }
  if (inbound.rts_due && !inbound.rts_received)
    inbound.message = nullptr;  // on_rts() forgets it
  else
    forget(inbound);
  if (message == nullptr) return;
  message->state = kIdle;
  message->owner->message_done(*message, total);
}

FrameDecoder::Buffers FrameDecoder::buffers() {
  Buffers buffers;
  if (target_ != nullptr) buffers[0] = sink_.room_for(*target_, frame_.offset + done_, frame_.length - done_);
  direct_ = buffers[0];
  // If the target has less room than the payload, the rest goes to the staging buffer, which is also correct.
  buffers[1] = std::span(staging_).subspan(end_);
  return buffers;
}

std::string_view FrameDecoder::decode(std::size_t bytes) {
  const std::size_t direct = std::min(bytes, direct_.size());
  if (direct > 0)
    if (const std::string_view wrong = advance(direct_.first(direct)); !wrong.empty()) return wrong;
  end_ += bytes - direct;
  return end_ > begin_ ? read_staged() : "";
}

/// Accounts for bytes of the payload that are in their final place.
std::string_view FrameDecoder::advance(std::span<const std::byte> bytes) {
  done_ += bytes.size();
  if (seal_.payloads() && !verified_) seal_.add(bytes);
  return done_ < frame_.length ? "" : end_payload();
}

std::string_view FrameDecoder::end_payload() {
  if (seal_.payloads() && !verified_ && !same(seal_.payload_code(), frame_.payload_code))
    return damage("the payload of a message");
  seal_.next_frame();
  sink_.frame_ends(*target_, frame_.length);
  target_ = nullptr;
  return "";
}

std::string_view FrameDecoder::damage(std::string_view what) noexcept {
  damaged_ = true;
  return what;
}

std::string_view FrameDecoder::read_header() {
  std::memcpy(&frame_, staging_.data() + begin_, sizeof(Frame));
  begin_ += sizeof(Frame);
  if (frame_.magic != Frame::kMagic) return damage("bytes that are not a frame of this version");
  if (!same(seal_.header_code(frame_), frame_.header_code)) return damage("the header of a message");
  if (closed_) return "bytes after its last frame";
  if (const std::string_view wrong = flaw(frame_); !wrong.empty()) return wrong;
  closed_ = frame_.kind == FrameKind::close;
  if (const std::string_view wrong = sink_.frame_begins(frame_, target_); !wrong.empty()) return wrong;
  if (target_ != nullptr) return begin_payload();
  seal_.next_frame();
  return "";
}

/// A payload that is completely staged is verified before any target memory is written.
std::string_view FrameDecoder::begin_payload() {
  done_ = 0;
  verified_ = end_ - begin_ >= frame_.length;
  if (seal_.payloads() && !verified_)
    seal_.begin_payload();
  else if (seal_.payloads() &&
           !same(seal_.payload_code({staging_.data() + begin_, frame_.length}), frame_.payload_code))
    return damage("the payload of a message");
  return frame_.length == 0 ? end_payload() : "";
}

std::string_view FrameDecoder::read_staged() {
  while (begin_ < end_) {
    std::string_view wrong;
    if (target_ != nullptr) {
      const std::size_t most = std::min<std::size_t>(end_ - begin_, frame_.length - done_);
      const std::span<std::byte> room = sink_.room_for(*target_, frame_.offset + done_, most);
      std::memcpy(room.data(), staging_.data() + begin_, room.size());
      begin_ += room.size();
      wrong = advance(room);
    } else if (end_ - begin_ < sizeof(Frame)) {
      break;
    } else {
      wrong = read_header();
    }
    if (!wrong.empty()) return wrong;
  }
  std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);  // at most a part of a header
  end_ -= begin_;
  begin_ = 0;
  return "";
}

}  // namespace tessera::comm::tcp
