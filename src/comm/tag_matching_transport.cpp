#include "tessera/comm/tag_matching_transport.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "tessera/comm/transport/match_queues.h"

namespace tessera::comm {
namespace {

constexpr auto kSinkTime = std::chrono::seconds(2);

// Message::state
constexpr std::uint32_t kReceive = 1;     // otherwise a send
constexpr std::uint32_t kMatching = 2;    // in a table: a receive, or a large send without a CTS
constexpr std::uint32_t kBacklog = 4;     // an eager send that waits for room
constexpr std::uint32_t kBulk = 8;        // the link is moving it
constexpr std::uint32_t kAnnounced = 16;  // a receive whose RTS has arrived with an equal size
constexpr std::uint32_t kMoved = 32;      // a receive whose bulk transfer is done
constexpr std::uint32_t kFinished = 64;   // to be delivered by the next poll()
constexpr std::uint32_t kSink = 128;      // of a drain buffer: receives data of a cancelled receive

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
  MatchTable<Message> sends;              ///< large ones without a CTS
  MatchTable<UnexpectedMessage> content;  ///< and RTS messages, before their receives
  MatchTable<UnexpectedMessage> asks;     ///< CTS messages before their sends
  MatchList<Message> backlog;
  MatchList<Message> finished;
  MatchList<UnexpectedMessage> spare;
  std::list<DrainBuffer> sinks;
  DiscardedCommunicators given_up;

  ~MatchQueues() {
    const auto destroy = [](UnexpectedMessage& arrived) { delete &arrived; };
    const auto all = [](const UnexpectedMessage&) { return true; };
    content.drain(all, destroy);
    asks.drain(all, destroy);
    while (UnexpectedMessage* arrived = spare.first()) {
      spare.remove(*arrived);
      delete arrived;
    }
  }

  void keep(MatchTable<UnexpectedMessage>& table, const AmHeader& header, std::span<const std::byte> payload) {
    UnexpectedMessage* arrived = spare.first();
    if (arrived != nullptr) {
      spare.remove(*arrived);
    } else {
      arrived = new UnexpectedMessage;
    }
    arrived->header = header;
    arrived->peer = header.from;
    arrived->tag = header.tag;
    arrived->payload.assign(payload.begin(), payload.end());
    table.insert(*arrived);
  }
  void drop(MatchTable<UnexpectedMessage>& table, UnexpectedMessage& arrived) {
    table.remove(arrived);
    spare.append(arrived);
  }
};

TagMatchingTransport::TagMatchingTransport(const Bootstrap& bootstrap, TransportEvents& events,
                                           const LinkFactory& make_link)
    : rank_(bootstrap.rank()),
      world_(world_number(bootstrap)),
      events_(events),
      tables_(std::make_unique<MatchQueues>()),
      link_(make_link(*this)) {}

TagMatchingTransport::~TagMatchingTransport() = default;

ProgressWaiter& TagMatchingTransport::waiter() noexcept { return link_->waiter(); }

NativeCollectives* TagMatchingTransport::native() noexcept { return link_->native(); }

AmHeader TagMatchingTransport::header_of(AmHeader::Kind kind, const Message& message,
                                         std::uint64_t slot) const noexcept {
  return {.kind = kind, .from = rank_, .tag = message.tag, .world = world_, .bytes = message.bytes, .slot = slot};
}

void TagMatchingTransport::send_note(AmHeader::Kind kind, const Message& message, std::uint64_t slot) noexcept {
  link_->send_note(message.peer, header_of(kind, message, slot), {});
}

void TagMatchingTransport::send_content(Message& message) noexcept {
  link_->send_note(message.peer, header_of(AmHeader::Kind::content, message, 0), {message.data, message.bytes});
  if (message.sent != nullptr) message.sent->fetch_add(message.bytes);
  deliver(message, message.bytes);
}

void TagMatchingTransport::send(Message& message) noexcept {
  message.state = 0;
  if (dead_) return;
  if (message.bytes <= link_->longest_payload()) {
    if (tables_->backlog.empty() && link_->can_send_eager()) return send_content(message);
    message.state = kBacklog;
    return tables_->backlog.append(message);
  }
  send_note(AmHeader::Kind::announce, message, 0);
  UnexpectedMessage* const ask = tables_->asks.find(message.peer, message.tag);
  if (ask == nullptr) {
    message.state = kMatching;
    return tables_->sends.insert(message);
  }
  const AmHeader header = ask->header;
  tables_->drop(tables_->asks, *ask);
  start_bulk_send(message, header);
}

/// If the sizes differ, nothing moves: the receiver learns the size from the RTS.
void TagMatchingTransport::start_bulk_send(Message& message, const AmHeader& ask) noexcept {
  if (ask.bytes != message.bytes) return deliver(message, message.bytes);
  message.state = kBulk;
  link_->send_bulk(message, ask.slot);
}

void TagMatchingTransport::receive(Message& message) noexcept {
  message.state = kReceive;
  if (dead_) return;
  UnexpectedMessage* const arrived = tables_->content.find(message.peer, message.tag);
  if (arrived != nullptr) {
    const AmHeader& header = arrived->header;
    if (header.kind == AmHeader::Kind::content || header.bytes != message.bytes) {
      if (header.kind == AmHeader::Kind::content && header.bytes == message.bytes && message.bytes > 0)
        std::memcpy(message.data, arrived->payload.data(), message.bytes);
      const std::size_t bytes = header.bytes;
      tables_->drop(tables_->content, *arrived);
      return deliver(message, bytes);
    }
    message.state |= kAnnounced;
    tables_->drop(tables_->content, *arrived);
  }
  message.state |= kMatching;
  tables_->receives.insert(message);
  if (message.bytes <= link_->longest_payload()) return;
  message.moved = next_slot_++;
  message.state |= kBulk;
  link_->receive_bulk(message, message.moved);
  if ((message.state & kBulk) != 0) send_note(AmHeader::Kind::ask, message, message.moved);
}

/// Handles an eager message or an RTS that matches `receive`.
void TagMatchingTransport::match(Message& receive, const AmHeader& header,
                                 std::span<const std::byte> payload) noexcept {
  if (header.bytes != receive.bytes) {
    end_bulk(receive, false);  // no data will come: the sender compares the sizes, too
    return finish(receive, header.bytes);
  }
  if (header.kind == AmHeader::Kind::content) {
    if (!payload.empty()) std::memcpy(receive.data, payload.data(), payload.size());
    return finish(receive, header.bytes);
  }
  receive.state |= kAnnounced;
  if ((receive.state & kMoved) != 0) finish(receive, receive.bytes);
}

void TagMatchingTransport::note_arrived(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  if (header.world != world_) return;
  switch (header.kind) {
    case AmHeader::Kind::content:
    case AmHeader::Kind::announce: {
      // A receive with an RTS waits for its bulk: the next message of that tag is for the next receive.
      const auto wanted = [](const Message& m) { return (m.state & kAnnounced) == 0; };
      Message* const receive = tables_->receives.find(header.from, header.tag, wanted);
      if (receive != nullptr) return match(*receive, header, payload);
      if (!tables_->given_up.has(header.tag)) tables_->keep(tables_->content, header, payload);
      return;
    }
    case AmHeader::Kind::ask: {
      Message* const message = tables_->sends.find(header.from, header.tag);
      if (message == nullptr) return tables_->keep(tables_->asks, header, {});
      tables_->sends.remove(*message);
      message->state = 0;
      return start_bulk_send(*message, header);
    }
    case AmHeader::Kind::withdraw:
      return on_cts_cancel(header);
    case AmHeader::Kind::withdrawn:
      return close_sink(header.from, header.slot);
    case AmHeader::Kind::offer:
    case AmHeader::Kind::taken:
      return;  // CmaLink handles them
  }
}

/// If the bulk transfer has started, no reply is needed: it ends in the drain buffer.
void TagMatchingTransport::on_cts_cancel(const AmHeader& header) noexcept {
  const auto wanted = [&](const UnexpectedMessage& ask) { return ask.header.slot == header.slot; };
  UnexpectedMessage* const ask = tables_->asks.find(header.from, header.tag, wanted);
  if (ask == nullptr) return;
  tables_->drop(tables_->asks, *ask);
  AmHeader answer = header;
  answer.kind = AmHeader::Kind::withdrawn;
  answer.from = rank_;
  link_->send_note(header.from, answer, {});
}

void TagMatchingTransport::close_sink(int peer, std::uint64_t slot) noexcept {
  const auto found = std::find_if(tables_->sinks.begin(), tables_->sinks.end(), [&](const DrainBuffer& sink) {
    return sink.message.peer == peer && sink.slot == slot;
  });
  if (found == tables_->sinks.end()) return;
  link_->cancel_bulk(found->message);  // at once, since nothing was sent to it
  tables_->sinks.erase(found);
}

void TagMatchingTransport::bulk_done(Message& message) noexcept {
  message.state &= ~kBulk;
  if ((message.state & kSink) != 0)
    return void(tables_->sinks.remove_if([&](const DrainBuffer& sink) { return &sink.message == &message; }));
  if ((message.state & kReceive) == 0) {
    if (message.sent != nullptr) message.sent->fetch_add(message.bytes);
    return deliver(message, message.bytes);
  }
  message.state |= kMoved;
  if ((message.state & kAnnounced) != 0) finish(message, message.bytes);
}

/// The message stays in flight until its operation fails, for this or another cause.
void TagMatchingTransport::bulk_failed(Message& message, const std::string& why) noexcept {
  message.state &= ~kBulk;
  if ((message.state & kSink) != 0) return bulk_done(message);
  peer_lost(message.peer, why);
}

void TagMatchingTransport::peer_lost(int peer, const std::string& why) noexcept { lost_.emplace_back(peer, why); }

void TagMatchingTransport::link_failed(const std::string& why) noexcept {
  if (!std::exchange(dead_, true)) failure_ = why;
}

/// Completes a matched receive.
void TagMatchingTransport::finish(Message& message, std::size_t bytes) noexcept {
  tables_->receives.remove(message);
  deliver(message, bytes);
}

/// Inside cancel() the world is iterating over its own list: the next poll() reports messages that complete there.
void TagMatchingTransport::deliver(Message& message, std::size_t bytes) noexcept {
  message.state = 0;
  if (!cancelling_) return message.owner->message_done(message, bytes);
  message.state = kFinished;
  message.moved = bytes;
  tables_->finished.append(message);
}

/// Removes the message from the link. True: the link no longer accesses its memory.
bool TagMatchingTransport::end_bulk(Message& message, bool may_come) noexcept {
  if ((message.state & kBulk) == 0) return true;
  const std::uint64_t slot = message.moved;
  const bool receiving = (message.state & kReceive) != 0;
  const Link::CancelResult how = link_->cancel_bulk(message);
  message.state &= ~kBulk;
  if (how == Link::CancelResult::never) return false;
  if (how == Link::CancelResult::after || !receiving) return true;
  if (may_come) post_drain(message, slot);
  send_note(AmHeader::Kind::withdraw, message, slot);
  return true;
}

/// The CTS may already have been answered. Memory that is never written uses only address space.
void TagMatchingTransport::post_drain(const Message& instead_of, std::uint64_t slot) noexcept {
  DrainBuffer& sink = tables_->sinks.emplace_back();
  sink.slot = slot;
  sink.memory = std::make_unique_for_overwrite<std::byte[]>(instead_of.bytes);
  sink.message.data = sink.memory.get();
  sink.message.bytes = instead_of.bytes;
  sink.message.peer = instead_of.peer;
  sink.message.tag = instead_of.tag;
  sink.message.state = kReceive | kSink | kBulk;
  sinks_until_ = Clock::now() + kSinkTime;
  link_->receive_bulk(sink.message, slot);
}

/// Also true to report a failure of the transport, which communicators without an operation in flight must learn too.
bool TagMatchingTransport::needs_polls() const noexcept { return !failure_.empty() || awaits_answers(); }

bool TagMatchingTransport::awaits_answers() const noexcept {
  return !dead_ && !tables_->sinks.empty() && Clock::now() < sinks_until_;
}

void TagMatchingTransport::cancel(Message& message) noexcept {
  gave_up_ = true;
  const std::uint32_t state = message.state;
  if ((state & kFinished) != 0) tables_->finished.remove(message);
  if ((state & kBacklog) != 0) tables_->backlog.remove(message);
  if ((state & kMatching) != 0) ((state & kReceive) != 0 ? tables_->receives : tables_->sends).remove(message);
  message.state &= kReceive | kBulk;
  if ((message.state & kBulk) == 0 || dead_) return;
  cancelling_ = true;
  const bool safe = end_bulk(message, true);
  cancelling_ = false;
  if (safe) return;
  // Only a closed link is certain not to access that memory.
  link_->close(Link::CloseMode::broken);
  link_failed("rank " + std::to_string(message.peer) + " did not finish a message that was under way");
}

/// CTS messages are kept: the receiver cancels them and waits for the reply.
void TagMatchingTransport::discard_communicator(std::uint32_t communicator) noexcept {
  tables_->given_up.add(communicator);
  tables_->content.drain([&](const UnexpectedMessage& arrived) { return arrived.tag.communicator == communicator; },
                         [&](UnexpectedMessage& arrived) {
                           arrived.payload = {};
                           tables_->spare.append(arrived);
                         });
}

/// Delivers messages that completed while the world couldn't be called.
bool TagMatchingTransport::deliver_deferred() noexcept {
  bool moved = false;
  while (Message* message = tables_->finished.first()) {
    tables_->finished.remove(*message);
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
  while (!dead_ && !tables_->backlog.empty() && link_->can_send_eager()) {
    Message& message = *tables_->backlog.first();
    tables_->backlog.remove(message);
    send_content(message);
    moved = true;
  }
  return moved;
}

void TagMatchingTransport::close(bool failed) noexcept {
  cancelling_ = true;
  while (!failed && awaits_answers())
    if (!link_->poll(true)) std::this_thread::yield();
  if (std::exchange(dead_, true)) return;
  link_->close(failed ? Link::CloseMode::broken : gave_up_ ? Link::CloseMode::with_failures : Link::CloseMode::orderly);
}

}  // namespace tessera::comm
