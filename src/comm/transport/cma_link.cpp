#include "tessera/comm/transport/cma_link.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <random>
#include <utility>

#include "tessera/comm/transport/cma.h"

namespace tessera::comm {
namespace {

/// Below this size, the shared memory of UCX and MPI is as fast as the kernel at its best (7.6 us for 128 KiB), and
/// sometimes twice as fast (docs/performance.md).
constexpr std::size_t kShortest = std::size_t{384} << 10;
constexpr std::size_t kPiece = std::size_t{512} << 10;  // read in one poll, so that other messages progress too

/// A number's address may hold other memory when a late reader reads it: no other content is likely to equal it.
std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

/// The content of an offer after its header. Addresses are the sender's.
struct CmaAddress {
  const std::byte* data = nullptr;
  const std::atomic<std::uint64_t>* number_at = nullptr;
  std::uint64_t number = 0;
};

}  // namespace

struct CmaLink::CmaSend {
  std::atomic<std::uint64_t> number{0};  ///< 0 as soon as the message's memory belongs to its owner again
  Message* message = nullptr;
  std::uint64_t slot = 0;
};

struct CmaLink::CmaReceive {
  Message* message = nullptr;
  std::uint64_t slot = 0;
  bool offered = false;
  CmaAddress offer;
  std::size_t done = 0;
};

CmaLink::CmaLink(const Bootstrap& bootstrap, std::vector<int> processes, LinkEvents& events, const Factory& make_link)
    : events_(events),
      rank_(bootstrap.rank()),
      world_(world_number(bootstrap)),
      processes_(std::move(processes)),
      number_(random_number()),
      link_(make_link(*this)) {}

CmaLink::~CmaLink() = default;

bool CmaLink::is_near(const Message& message) const noexcept {
  return message.bytes >= kShortest && processes_[static_cast<std::size_t>(message.peer)] != 0;
}

void CmaLink::send_note(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept {
  link_->send_note(peer, header, payload);
}

void CmaLink::send_bulk(Message& message, std::uint64_t slot) noexcept {
  if (!is_near(message)) return link_->send_bulk(message, slot);
  if (idle_sendings_.empty()) idle_sendings_.push_back(sendings_.emplace_back(std::make_unique<CmaSend>()).get());
  CmaSend& sending = *idle_sendings_.back();
  idle_sendings_.pop_back();
  sent_.push_back(&sending);
  sending.message = &message;
  sending.slot = slot;
  message.handle = &sending;
  sending.number.store(++number_);
  const CmaAddress offer{message.data, &sending.number, number_};
  link_->send_note(message.peer,
                   {.kind = AmHeader::Kind::offer,
                    .from = rank_,
                    .tag = message.tag,
                    .world = world_,
                    .bytes = message.bytes,
                    .slot = slot},
                   std::as_bytes(std::span(&offer, 1)));
}

void CmaLink::receive_bulk(Message& message, std::uint64_t slot) noexcept {
  if (!is_near(message)) return link_->receive_bulk(message, slot);
  readings_.push_back(std::make_unique<CmaReceive>());
  readings_.back()->message = &message;
  readings_.back()->slot = slot;
  message.handle = readings_.back().get();
}

void CmaLink::note_arrived(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  const bool ours = header.kind == AmHeader::Kind::offer || header.kind == AmHeader::Kind::taken;
  if (!ours) return events_.note_arrived(header, payload);
  if (header.world != world_) return;
  header.kind == AmHeader::Kind::offer ? begin_reading(header, payload) : end_sending(header.from, header.slot);
}

void CmaLink::begin_reading(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  const auto found = std::find_if(readings_.begin(), readings_.end(), [&](const auto& reading) {
    return reading->slot == header.slot && reading->message->peer == header.from && !reading->offered;
  });
  // Cancelled meanwhile: the sender need not wait.
  if (found == readings_.end()) return send_fin(header.from, header.slot);
  CmaReceive& reading = **found;
  if (payload.size() != sizeof(CmaAddress) || header.bytes != reading.message->bytes) return;
  std::memcpy(&reading.offer, payload.data(), sizeof(CmaAddress));
  reading.offered = true;
  reading.done = 0;
  ++offered_;
}

void CmaLink::end_sending(int peer, std::uint64_t slot) noexcept {
  const auto found = std::find_if(sent_.begin(), sent_.end(), [&](const CmaSend* sending) {
    return sending->slot == slot && sending->message->peer == peer;
  });
  if (found == sent_.end()) return;  // cancelled
  Message& message = *(*found)->message;
  release(**found);
  events_.bulk_done(message);
}

void CmaLink::release(CmaSend& sending) noexcept {
  sending.number.store(0);
  sending.message->handle = nullptr;
  sending.message = nullptr;
  sent_.erase(std::find(sent_.begin(), sent_.end(), &sending));
  idle_sendings_.push_back(&sending);
}

void CmaLink::release(CmaReceive& reading) noexcept {
  reading.message->handle = nullptr;
  if (reading.offered) --offered_;
  const auto is_it = [&](const auto& one) { return one.get() == &reading; };
  readings_.erase(std::find_if(readings_.begin(), readings_.end(), is_it));
}

void CmaLink::send_fin(int peer, std::uint64_t slot) noexcept {
  link_->send_note(peer, {.kind = AmHeader::Kind::taken, .from = rank_, .world = world_, .slot = slot}, {});
}

bool CmaLink::read(int peer, const void* from, void* to, std::size_t bytes, std::string& why) const noexcept {
  try {
    if (read_remote(processes_[static_cast<std::size_t>(peer)], from, to, bytes)) return true;
    why = "its process has ended";
  } catch (const std::exception& error) {
    why = error.what();
  }
  return false;
}

void CmaLink::read_some(CmaReceive& reading) noexcept {
  Message& message = *reading.message;
  const int peer = message.peer;
  const std::size_t bytes = std::min(kPiece, message.bytes - reading.done);
  std::string why;
  const bool there = read(peer, reading.offer.data + reading.done, message.data + reading.done, bytes, why);
  reading.done += bytes;
  if (there && reading.done < message.bytes) return;
  std::uint64_t number = 0;
  std::string gone;
  const bool alive = read(peer, reading.offer.number_at, &number, sizeof(number), gone);
  if (alive && number != reading.offer.number) {  // the sender cancelled it: nothing was received
    reading.offered = false;
    --offered_;
    return;
  }
  const std::uint64_t slot = reading.slot;
  release(reading);
  if (!there || !alive) return events_.bulk_failed(message, there ? gone : why);
  send_fin(peer, slot);
  events_.bulk_done(message);
}

bool CmaLink::poll(bool with_health_check) noexcept {
  const bool moved = link_->poll(with_health_check);
  if (offered_ == 0) return moved;
  // Completed reads notify their owner, which may start others: iterate by index, over the present ones only.
  std::vector<CmaReceive*> now;
  for (const auto& reading : readings_)
    if (reading->offered) now.push_back(reading.get());
  for (CmaReceive* reading : now) {
    const bool still =
        std::any_of(readings_.begin(), readings_.end(), [&](const auto& r) { return r.get() == reading; });
    if (still && reading->offered) read_some(*reading);
  }
  return true;
}

Link::CancelResult CmaLink::cancel_bulk(Message& message) noexcept {
  if (!is_near(message)) return link_->cancel_bulk(message);
  const auto sending =
      std::find_if(sent_.begin(), sent_.end(), [&](const CmaSend* s) { return s->message == &message; });
  if (sending != sent_.end()) {
    release(**sending);
    return CancelResult::after;
  }
  CmaReceive& reading = *static_cast<CmaReceive*>(message.handle);
  const bool offered = reading.offered;
  if (offered) send_fin(message.peer, reading.slot);
  release(reading);
  return offered ? CancelResult::after : CancelResult::before;
}

}  // namespace tessera::comm
