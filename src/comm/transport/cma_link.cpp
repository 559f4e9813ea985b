#include "tessera/comm/transport/cma_link.h"

#include <algorithm>
#include <atomic>
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
constexpr std::size_t kChunk = std::size_t{512} << 10;  // read in one poll, so that other messages progress too

/// A number's address may hold other memory when a late reader reads it: no other content is likely to equal it.
std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

/// The payload of a CMA address message. Addresses are the sender's.
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
  bool readable = false;
  CmaAddress address;
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

bool CmaLink::uses_cma(const Message& message) const noexcept {
  return message.bytes >= kShortest && processes_[static_cast<std::size_t>(message.peer)] != 0;
}

void CmaLink::send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept {
  link_->send_am(peer, header, payload);
}

void CmaLink::send_bulk(Message& message, std::uint64_t slot) noexcept {
  if (!uses_cma(message)) return link_->send_bulk(message, slot);
  if (idle_sends_.empty()) idle_sends_.push_back(sends_.emplace_back(std::make_unique<CmaSend>()).get());
  CmaSend& send = *idle_sends_.back();
  idle_sends_.pop_back();
  sent_.push_back(&send);
  send.message = &message;
  send.slot = slot;
  message.handle = &send;
  send.number.store(++number_);
  const CmaAddress address{message.data, &send.number, number_};
  link_->send_am(message.peer,
                 {.kind = AmHeader::Kind::cma_address,
                  .from = rank_,
                  .tag = message.tag,
                  .world = world_,
                  .bytes = message.bytes,
                  .slot = slot},
                 std::as_bytes(std::span(&address, 1)));
}

void CmaLink::receive_bulk(Message& message, std::uint64_t slot) noexcept {
  if (!uses_cma(message)) return link_->receive_bulk(message, slot);
  receives_.push_back(std::make_unique<CmaReceive>());
  receives_.back()->message = &message;
  receives_.back()->slot = slot;
  message.handle = receives_.back().get();
}

void CmaLink::on_am(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  const bool ours = header.kind == AmHeader::Kind::cma_address || header.kind == AmHeader::Kind::fin;
  if (!ours) return events_.on_am(header, payload);
  if (header.world != world_) return;
  header.kind == AmHeader::Kind::cma_address ? start_receive(header, payload) : finish_send(header.from, header.slot);
}

void CmaLink::start_receive(const AmHeader& header, std::span<const std::byte> payload) noexcept {
  const auto found = std::ranges::find_if(receives_, [&](const auto& receive) {
    return receive->slot == header.slot && receive->message->peer == header.from && !receive->readable;
  });
  // Cancelled meanwhile: the sender need not wait.
  if (found == receives_.end()) return send_fin(header.from, header.slot);
  CmaReceive& receive = **found;
  if (payload.size() != sizeof(CmaAddress) || header.bytes != receive.message->bytes) return;
  std::memcpy(&receive.address, payload.data(), sizeof(CmaAddress));
  receive.readable = true;
  receive.done = 0;
  ++readable_;
}

void CmaLink::finish_send(int peer, std::uint64_t slot) noexcept {
  const auto found = std::ranges::find_if(
      sent_, [&](const CmaSend* send) { return send->slot == slot && send->message->peer == peer; });
  if (found == sent_.end()) return;  // cancelled
  Message& message = *(*found)->message;
  release(**found);
  events_.bulk_done(message);
}

void CmaLink::release(CmaSend& send) noexcept {
  send.number.store(0);
  std::atomic_thread_fence(std::memory_order_release);  // before what the owner of the memory now writes there
  send.message->handle = nullptr;
  send.message = nullptr;
  sent_.erase(std::ranges::find(sent_, &send));
  idle_sends_.push_back(&send);
}

void CmaLink::release(CmaReceive& receive) noexcept {
  receive.message->handle = nullptr;
  if (receive.readable) --readable_;
  const auto is_it = [&](const auto& one) { return one.get() == &receive; };
  receives_.erase(std::ranges::find_if(receives_, is_it));
}

void CmaLink::send_fin(int peer, std::uint64_t slot) noexcept {
  link_->send_am(peer, {.kind = AmHeader::Kind::fin, .from = rank_, .world = world_, .slot = slot}, {});
}

bool CmaLink::read(int peer, const void* from, void* to, std::size_t bytes, std::string& why) const noexcept {
  try {
    if (cma_read(processes_[static_cast<std::size_t>(peer)], peer, from, to, bytes)) return true;
    why = "its process has ended";
  } catch (const std::exception& error) {
    why = error.what();
  }
  return false;
}

void CmaLink::read_some(CmaReceive& receive) noexcept {
  Message& message = *receive.message;
  const int peer = message.peer;
  const std::size_t bytes = std::min(kChunk, message.bytes - receive.done);
  std::string why;
  const bool there = read(peer, receive.address.data + receive.done, message.data + receive.done, bytes, why);
  receive.done += bytes;
  if (there && receive.done < message.bytes) return;
  std::uint64_t number = 0;
  std::string gone;
  const bool alive = read(peer, receive.address.number_at, &number, sizeof(number), gone);
  if (alive && number != receive.address.number) {  // the sender cancelled it: nothing was received
    receive.readable = false;
    --readable_;
    return;
  }
  const std::uint64_t slot = receive.slot;
  release(receive);
  if (!there || !alive) return events_.bulk_failed(message, there ? gone : why);
  send_fin(peer, slot);
  events_.bulk_done(message);
}

bool CmaLink::poll(bool with_health_check) noexcept {
  const bool moved = link_->poll(with_health_check);
  if (readable_ == 0) return moved;
  // Completed reads notify their owner, which may start others: iterate by index, over the present ones only.
  std::vector<CmaReceive*> now;
  for (const auto& receive : receives_)
    if (receive->readable) now.push_back(receive.get());
  for (CmaReceive* receive : now) {
    const bool still = std::ranges::any_of(receives_, [&](const auto& r) { return r.get() == receive; });
    if (still && receive->readable) read_some(*receive);
  }
  return true;
}

Link::CancelResult CmaLink::cancel_bulk(Message& message) noexcept {
  if (!uses_cma(message)) return link_->cancel_bulk(message);
  const auto send = std::ranges::find_if(sent_, [&](const CmaSend* s) { return s->message == &message; });
  if (send != sent_.end()) {
    release(**send);
    return CancelResult::completed;
  }
  CmaReceive& receive = *static_cast<CmaReceive*>(message.handle);
  const bool readable = receive.readable;
  if (readable) send_fin(message.peer, receive.slot);
  release(receive);
  return readable ? CancelResult::completed : CancelResult::not_started;
}

}  // namespace tessera::comm
