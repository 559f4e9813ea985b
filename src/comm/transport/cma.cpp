#include "tessera/comm/transport/cma.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/env_variables.h"

namespace tessera::comm {
namespace {

/// A test address and its content, which differs in another process with the same pid.
struct Sample {
  pid_t pid = 0;
  int wanted = 0;
  const std::byte* place = nullptr;
  std::array<unsigned, 8> content = {};
};

bool is_readable(const Sample& sample) {
  decltype(sample.content) seen = {};
  iovec to{seen.data(), sizeof(seen)};
  iovec from{const_cast<std::byte*>(sample.place), sizeof(seen)};
  return ::process_vm_readv(sample.pid, &to, 1, &from, 1, 0) == static_cast<ssize_t>(sizeof(seen)) &&
         seen == sample.content;
}

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

std::vector<int> cma_processes(Bootstrap& bootstrap, bool wanted) {
  const auto me = static_cast<std::size_t>(bootstrap.rank());
  const auto ranks = static_cast<std::size_t>(bootstrap.size());
  Sample own;
  own.pid = ::getpid();
  own.wanted = parse_flag(env_or_default(env::kCma), env::kCma.name) && wanted ? 1 : 0;
  std::random_device random;
  for (unsigned& word : own.content) word = random();
  own.place = reinterpret_cast<const std::byte*>(own.content.data());
  std::vector<int> processes(ranks, 0);
  std::string shown(ranks, '0');
  const std::vector<std::string> blobs = bootstrap.all_gather({reinterpret_cast<const char*>(&own), sizeof(own)});
  for (std::size_t r = 0; r < ranks; ++r) {
    Sample sample;
    if (blobs[r].size() != sizeof(sample))
      throw SystemError("rank " + std::to_string(r) + " runs another version of the library");
    std::memcpy(&sample, blobs[r].data(), sizeof(sample));
    if (r == me || bootstrap.hosts()[r] != bootstrap.hosts()[me]) continue;
    if (own.wanted == 0 || sample.wanted == 0 || !is_readable(sample)) continue;
    processes[r] = sample.pid;
    shown[r] = '1';
  }
  // Also keeps every rank here until the last one has read.
  const std::vector<std::string> readable = bootstrap.all_gather(shown);
  for (std::size_t r = 0; r < ranks; ++r)
    if (readable[r].size() != ranks || readable[r][me] != '1') processes[r] = 0;
  return processes;
}

bool cma_read(int pid, int rank, const void* from, void* to, std::size_t bytes) {
  while (bytes > 0) {
    iovec mine{to, bytes};
    iovec theirs{const_cast<void*>(from), bytes};
    const ssize_t n = ::process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    if (n < 0 && errno == ESRCH) return false;
    if (n <= 0)
      throw system_error("can't read the memory of rank " + std::to_string(rank) + " (process " + std::to_string(pid) +
                         "), as where it is a device's or secret, or the process has become undumpable; set "
                         "TESSERA_CMA=0 on all ranks");
    from = static_cast<const std::byte*>(from) + n;
    to = static_cast<std::byte*>(to) + n;
    bytes -= static_cast<std::size_t>(n);
  }
  // The kernel's loads are this thread's. They come before a load that tells whether the memory was still its owner's,
  // and before a message by which the owner gets it back.
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

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
