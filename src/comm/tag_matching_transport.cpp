#include "tessera/comm/tag_matching_transport.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>

#include "tessera/comm/transport/match_queues.h"

namespace tessera::comm {
namespace {

constexpr auto kDrainTime = std::chrono::seconds(2);

// Message::state
constexpr std::uint32_t kReceive = 1;    // otherwise a send
constexpr std::uint32_t kMatching = 2;   // in a table: a receive, or a large send without a CTS
constexpr std::uint32_t kBacklog = 4;    // an eager send that waits for room
constexpr std::uint32_t kBulk = 8;       // the link is moving it
constexpr std::uint32_t kHasRts = 16;    // a receive whose RTS has arrived with an equal size
constexpr std::uint32_t kMoved = 32;     // a receive whose bulk transfer is done
constexpr std::uint32_t kFinished = 64;  // to be delivered by the next poll()
constexpr std::uint32_t kDrain = 128;    // of a drain buffer: receives data of a cancelled receive

}  // namespace

Link::~Link() = default;

std::uint32_t world_number(const Bootstrap& bootstrap) {
  std::uint32_t number = 0;
  std::memcpy(&number, bootstrap.token().data(), sizeof(number));
  return number;
}

/// An active message that arrived before its receive or its send.
struct TagMatchingTransport::UnexpectedMessage {
  AmHeader header;
  int peer = 0;
  MessageTag tag;
  UnexpectedMessage* next = nullptr;
  UnexpectedMessage* previous = nullptr;
  std::vector<std::byte> payload;
};

/// A bulk receive into the transport's own memory, which replaces a receive cancelled after its CTS was sent.
struct TagMatchingTransport::DrainBuffer {
  Message message;
  std::uint64_t slot = 0;
  std::unique_ptr<std::byte[]> memory;
};

struct TagMatchingTransport::MatchQueues {
  MatchTable<Message> receives;
  MatchTable<Message> sends;                ///< large ones without a CTS
  MatchTable<UnexpectedMessage> early;      ///< and RTS messages, before their receives
  MatchTable<UnexpectedMessage> early_cts;  ///< CTS messages before their sends
  MatchList<Message> backlog;
  MatchList<Message> finished;
  MatchList<UnexpectedMessage> spare;
  std::list<DrainBuffer> drains;
  DiscardedCommunicators discarded;

  ~MatchQueues() {
    const auto destroy = [](UnexpectedMessage& unexpected) { delete &unexpected; };
    const auto all = [](const UnexpectedMessage&) { return true; };
    early.drain(all, destroy);
    early_cts.drain(all, destroy);
    while (UnexpectedMessage* unexpected = spare.first()) {
      spare.remove(*unexpected);
      delete unexpected;
    }
  }

  void keep(MatchTable<UnexpectedMessage>& table, const AmHeader& header, std::span<const std::byte> payload) {
    UnexpectedMessage* unexpected = spare.first();
    if (unexpected != nullptr) {
      spare.remove(*unexpected);
    } else {
      unexpected = new UnexpectedMessage;
    }
    unexpected->header = header;
    unexpected->peer = header.from;
    unexpected->tag = header.tag;
    unexpected->payload.assign(payload.begin(), payload.end());
    table.insert(*unexpected);
  }
  void drop(MatchTable<UnexpectedMessage>& table, UnexpectedMessage& unexpected) {
    table.remove(unexpected);
    spare.append(unexpected);
  }
};

TagMatchingTransport::TagMatchingTransport(const Bootstrap& bootstrap, TransportEvents& events,
                                           const LinkFactory& make_link)
    : rank_(bootstrap.rank()),
      world_(world_number(bootstrap)),
      events_(events),
      queues_(std::make_unique<MatchQueues>()),
      link_(make_link(*this)) {}

TagMatchingTransport::~TagMatchingTransport() = default;

ProgressWaiter& TagMatchingTransport::waiter() noexcept { return link_->waiter(); }

NativeCollectives* TagMatchingTransport::native() noexcept { return link_->native(); }

AmHeader TagMatchingTransport::header_of(AmHeader::Kind kind, const Message& message,
                                         std::uint64_t slot) const noexcept {
  return {.kind = kind, .from = rank_, .tag = message.tag, .world = world_, .bytes = message.bytes, .slot = slot};
}

void TagMatchingTransport::send_am(AmHeader::Kind kind, const Message& message, std::uint64_t slot) noexcept {
  link_->send_am(message.peer, header_of(kind, message, slot), {});
}

void TagMatchingTransport::send_eager(Message& message) noexcept {
  link_->send_am(message.peer, header_of(AmHeader::Kind::eager, message, 0), {message.data, message.bytes});
  if (message.sent != nullptr) message.sent->fetch_add(message.bytes);
  deliver(message, message.bytes);
}

void TagMatchingTransport::send(Message& message) noexcept {
  message.state = 0;
  if (dead_) return;
  if (message.bytes <= link_->longest_payload()) {
    if (queues_->backlog.empty() && link_->can_send_eager()) return send_eager(message);
    message.state = kBacklog;
    return queues_->backlog.append(message);
  }
  send_am(AmHeader::Kind::rts, message, 0);
  UnexpectedMessage* const cts = queues_->early_cts.find(message.peer, message.tag);
  if (cts == nullptr) {
    message.state = kMatching;
    return queues_->sends.insert(message);
  }
  const AmHeader header = cts->header;
  queues_->drop(queues_->early_cts, *cts);
  start_bulk_send(message, header);
}

/// If the sizes differ, nothing moves: the receiver learns the size from the RTS.
void TagMatchingTransport::start_bulk_send(Message& message, const AmHeader& cts) noexcept {
  if (cts.bytes != message.bytes) return deliver(message, message.bytes);
  message.state = kBulk;
  link_->send_bulk(message, cts.slot);
}

void TagMatchingTransport::receive(Message& message) noexcept {
  message.state = kReceive;
  if (dead_) return;
  UnexpectedMessage* const unexpected = queues_->early.find(message.peer, message.tag);
  if (unexpected != nullptr) {
    const AmHeader& header = unexpected->header;
    if (header.kind == AmHeader::Kind::eager || header.bytes != message.bytes) {
      if (header.kind == AmHeader::Kind::eager && header.bytes == message.bytes && message.bytes > 0)
        std::memcpy(message.data, unexpected->payload.data(), message.bytes);
      const std::size_t bytes = header.bytes;
      queues_->drop(queues_->early, *unexpected);
      return deliver(message, bytes);
    }
    message.state |= kHasRts;
    queues_->drop(queues_->early, *unexpected);
  }
  message.state |= kMatching;
  queues_->receives.insert(message);
  if (message.bytes <= link_->longest_payload()) return;
  message.moved = next_slot_++;
  message.state |= kBulk;
  link_->receive_bulk(message, message.moved);
  if ((message.state & kBulk) != 0) send_am(AmHeader::Kind::cts, message, message.moved);
}

bool TagMatchingTransport::arrived(int peer, const MessageTag& tag) noexcept {
  return queues_->early.find(peer, tag) != nullptr;
}

/// Handles an eager message or an RTS that matches `receive`.
void TagMatchingTransport::match(Message& receive, const AmHeader& header,
                                 std::span<const std::byte> payload) noexcept {
  if (header.bytes != receive.bytes) {
    end_bulk(receive, false);  // no data will come: the sender compares the sizes, too
    return finish(receive, header.bytes);
  }
  if (header.kind == AmHeader::Kind::eager) {
    if (!payload.empty()) std::memcpy(receive.data, payload.data(), payload.size());
    return finish(receive, header.bytes);
  }
  receive.state |= kHasRts;
  if ((receive.state & kMoved) != 0) finish(receive, receive.bytes);
}

void TagMatchingTransport::on_am(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  if (header.world != world_) return;
  switch (header.kind) {
    case AmHeader::Kind::eager:
    case AmHeader::Kind::rts: {
      // A receive with an RTS waits for its bulk: the next message of that tag is for the next receive.
      const auto wanted = [](const Message& m) { return (m.state & kHasRts) == 0; };
      Message* const receive = queues_->receives.find(header.from, header.tag, wanted);
      if (receive != nullptr) return match(*receive, header, payload);
      if (!queues_->discarded.has(header.tag)) queues_->keep(queues_->early, header, payload);
      return;
    }
    case AmHeader::Kind::cts: {
      Message* const message = queues_->sends.find(header.from, header.tag);
      if (message == nullptr) return queues_->keep(queues_->early_cts, header, {});
      queues_->sends.remove(*message);
      message->state = 0;
      return start_bulk_send(*message, header);
    }
    case AmHeader::Kind::cts_cancel:
      return on_cts_cancel(header);
    case AmHeader::Kind::cts_cancel_ack:
      return close_drain(header.from, header.slot);
    case AmHeader::Kind::cma_address:
    case AmHeader::Kind::fin:
      return;  // CmaLink handles them
  }
}

/// If the bulk transfer has started, no reply is needed: it ends in the drain buffer.
void TagMatchingTransport::on_cts_cancel(const AmHeader& header) noexcept {
  const auto wanted = [&](const UnexpectedMessage& cts) { return cts.header.slot == header.slot; };
  UnexpectedMessage* const cts = queues_->early_cts.find(header.from, header.tag, wanted);
  if (cts == nullptr) return;
  queues_->drop(queues_->early_cts, *cts);
  AmHeader reply = header;
  reply.kind = AmHeader::Kind::cts_cancel_ack;
  reply.from = rank_;
  link_->send_am(header.from, reply, {});
}

void TagMatchingTransport::close_drain(int peer, std::uint64_t slot) noexcept {
  const auto found = std::ranges::find_if(
      queues_->drains, [&](const DrainBuffer& drain) { return drain.message.peer == peer && drain.slot == slot; });
  if (found == queues_->drains.end()) return;
  link_->cancel_bulk(found->message);  // at once, since nothing was sent to it
  queues_->drains.erase(found);
}

void TagMatchingTransport::bulk_done(Message& message) noexcept {
  message.state &= ~kBulk;
  if ((message.state & kDrain) != 0)
    return void(queues_->drains.remove_if([&](const DrainBuffer& drain) { return &drain.message == &message; }));
  if ((message.state & kReceive) == 0) {
    if (message.sent != nullptr) message.sent->fetch_add(message.bytes);
    return deliver(message, message.bytes);
  }
  message.state |= kMoved;
  if ((message.state & kHasRts) != 0) finish(message, message.bytes);
}

/// The message stays in flight until its operation fails, for this or another cause.
void TagMatchingTransport::bulk_failed(Message& message, const std::string& why) noexcept {
  message.state &= ~kBulk;
  if ((message.state & kDrain) != 0) return bulk_done(message);
  peer_lost(message.peer, why);
}

void TagMatchingTransport::peer_lost(int peer, const std::string& why) noexcept { lost_.emplace_back(peer, why); }

void TagMatchingTransport::link_failed(const std::string& why) noexcept {
  if (!std::exchange(dead_, true)) failure_ = why;
}

/// Completes a matched receive.
void TagMatchingTransport::finish(Message& message, std::size_t bytes) noexcept {
  queues_->receives.remove(message);
  deliver(message, bytes);
}

/// Inside cancel() the world is iterating over its own list: the next poll() reports messages that complete there.
void TagMatchingTransport::deliver(Message& message, std::size_t bytes) noexcept {
  message.state = 0;
  if (!cancelling_) return message.owner->message_done(message, bytes);
  message.state = kFinished;
  message.moved = bytes;
  queues_->finished.append(message);
}

// Cancelling a long receive. Its CTS says where the sender may write, and the answer may be on its way, so the memory
// can be given back to the caller only if nothing writes there any more:
//
//   receiver                                         sender
//   cancels the link's receive; another one          has not used the CTS: drops it, and replies cts_cancel_ack,
//   into a drain buffer takes its place                after which nothing will come
//   sends cts_cancel                                 has begun to write: says nothing; the transfer ends in the
//                                                      drain buffer, whose completion is the reply
//
// The buffer goes when either reply arrives. A sender that dies gives none, so close() waits for replies at most
// kDrainTime. A receive whose RTS named another size needs no buffer: the sender compares the sizes, too, and writes
// nothing. Where the link can't say whether it still writes (CancelResult::unsafe), the whole link is closed, since
// only then the memory is certainly free.

/// Removes the message from the link. True: the link no longer accesses its memory.
bool TagMatchingTransport::end_bulk(Message& message, bool may_come) noexcept {
  if ((message.state & kBulk) == 0) return true;
  const std::uint64_t slot = message.moved;
  const bool receiving = (message.state & kReceive) != 0;
  const Link::CancelResult how = link_->cancel_bulk(message);
  message.state &= ~kBulk;
  if (how == Link::CancelResult::unsafe) return false;
  if (how == Link::CancelResult::completed || !receiving) return true;
  if (may_come) post_drain(message, slot);
  send_am(AmHeader::Kind::cts_cancel, message, slot);
  return true;
}

/// The CTS may already have been answered. Memory that is never written uses only address space.
void TagMatchingTransport::post_drain(const Message& instead_of, std::uint64_t slot) noexcept {
  DrainBuffer& drain = queues_->drains.emplace_back();
  drain.slot = slot;
  drain.memory = std::make_unique_for_overwrite<std::byte[]>(instead_of.bytes);
  drain.message.data = drain.memory.get();
  drain.message.bytes = instead_of.bytes;
  drain.message.peer = instead_of.peer;
  drain.message.tag = instead_of.tag;
  drain.message.state = kReceive | kDrain | kBulk;
  drains_until_ = Clock::now() + kDrainTime;
  link_->receive_bulk(drain.message, slot);
}

/// Also true to report a failure of the transport, which communicators without an operation in flight must learn too.
bool TagMatchingTransport::needs_polls() const noexcept { return !failure_.empty() || awaits_replies(); }

bool TagMatchingTransport::awaits_replies() const noexcept {
  return !dead_ && !queues_->drains.empty() && Clock::now() < drains_until_;
}

void TagMatchingTransport::cancel(Message& message) noexcept {
  cancelled_any_ = true;
  const std::uint32_t state = message.state;
  if ((state & kFinished) != 0) queues_->finished.remove(message);
  if ((state & kBacklog) != 0) queues_->backlog.remove(message);
  if ((state & kMatching) != 0) ((state & kReceive) != 0 ? queues_->receives : queues_->sends).remove(message);
  message.state &= kReceive | kBulk;
  if ((message.state & kBulk) == 0 || dead_) return;
  cancelling_ = true;
  const bool safe = end_bulk(message, true);
  cancelling_ = false;
  if (safe) return;
  // Only a closed link is certain not to access that memory.
  link_->close(Link::CloseMode::abortive);
  link_failed("rank " + std::to_string(message.peer) + " did not finish a message that was under way");
}

/// CTS messages are kept: the receiver cancels them and waits for the reply.
void TagMatchingTransport::discard_communicator(std::uint32_t communicator) noexcept {
  queues_->discarded.add(communicator);
  queues_->early.drain([&](const UnexpectedMessage& unexpected) { return unexpected.tag.communicator == communicator; },
                       [&](UnexpectedMessage& unexpected) {
                         unexpected.payload = {};
                         queues_->spare.append(unexpected);
                       });
}

/// Delivers messages that completed while the world couldn't be called.
bool TagMatchingTransport::deliver_deferred() noexcept {
  bool moved = false;
  while (Message* message = queues_->finished.first()) {
    queues_->finished.remove(*message);
    message->state = 0;
    message->owner->message_done(*message, message->moved);
    moved = true;
  }
  for (const auto& [peer, why] : std::exchange(lost_, {})) events_.connection_lost(peer, why);
  const std::string failure = std::exchange(failure_, {});
  if (!failure.empty()) events_.transport_failed(failure);
  return moved;
}

bool TagMatchingTransport::poll(bool with_health_check) noexcept {
  bool moved = deliver_deferred();
  if (dead_) return moved;
  moved |= link_->poll(with_health_check);
  while (!dead_ && !queues_->backlog.empty() && link_->can_send_eager()) {
    Message& message = *queues_->backlog.first();
    queues_->backlog.remove(message);
    send_eager(message);
    moved = true;
  }
  return moved;
}

void TagMatchingTransport::close(bool failed) noexcept {
  cancelling_ = true;
  while (!failed && awaits_replies())
    if (!link_->poll(true)) std::this_thread::yield();
  if (std::exchange(dead_, true)) return;
  link_->close(failed           ? Link::CloseMode::abortive
               : cancelled_any_ ? Link::CloseMode::after_cancel
                                : Link::CloseMode::graceful);
}

}  // namespace tessera::comm
