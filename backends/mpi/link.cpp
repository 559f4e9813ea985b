#include "backends/mpi/link.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/fp_environment.h"

namespace tessera::comm::mpi {
namespace {

using namespace std::chrono_literals;
constexpr std::chrono::nanoseconds kShortest = 20us;
constexpr int kMaxDoublings = 5;
constexpr auto kYieldTime = 1s;  // after this a peer is probably late, and the shortest naps suffice
constexpr int kAmTag = 0;        // bulk uses the other tags
constexpr auto kPatience = 1s;   // for a message in flight that is cancelled
constexpr auto kClosing = 5s;    // for the last active messages
constexpr int kAmsPerPoll = 16;

}  // namespace

PollingWaiter::PollingWaiter() : wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_fd_) throw system_error("mpi: eventfd");
}

bool PollingWaiter::arm() noexcept {
  eventfd_t wakes = 0;
  ::eventfd_read(wake_fd_.get(), &wakes);
  if (naps_ < 4 * kMaxDoublings && !collective_in_flight_) ++naps_;
  if (collective_in_flight_ && waiting_since_ == Clock::time_point{}) waiting_since_ = Clock::now();
  yields_ = collective_in_flight_ && Clock::now() - waiting_since_ < kYieldTime;
  return true;
}

void PollingWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  if (yields_) return void(::sched_yield());
  const auto nap = kShortest * (1 << std::min(naps_ / 4, kMaxDoublings));
  const timespec limit{0, static_cast<long>(std::clamp<std::chrono::nanoseconds>(at_most, 0ns, nap).count())};
  pollfd entry{wake_fd_.get(), POLLIN, 0};
  ::ppoll(&entry, 1, &limit, nullptr);
}

void PollingWaiter::wake() noexcept { ::eventfd_write(wake_fd_.get(), 1); }

MpiLink::MpiLink(Bootstrap& bootstrap, TransportEvents& world, LinkEvents& events, std::chrono::milliseconds timeout,
                 std::size_t max_chunk)
    : events_(events),
      rank_(bootstrap.rank()),
      max_chunk_(max_chunk),
      ranks_(open_ranks(bootstrap, world, timeout)),
      collectives_({.ranks = &ranks_,
                    .rank = rank_,
                    .max_chunk = max_chunk,
                    .good = [this](int code) { return good(code); },
                    .failed = [this](const std::string& why) { fail(why); },
                    .abandoned = [this] { stop(); }}),
      arriving_(std::make_unique<std::array<AmBuffer, kReceives>>()) {
  receives_.fill(MPI_REQUEST_NULL);
  if (ranks_.comm == MPI_COMM_NULL) return;
  for (std::size_t i = 0; i < kReceives; ++i) post_receive(i);
}

/// False, permanently, after MPI has failed.
bool MpiLink::good(int code) noexcept {
  if (code != MPI_SUCCESS) fail(text_of(code));
  return failure_.empty();
}

void MpiLink::fail(const std::string& why) noexcept {
  if (!failure_.empty()) return;
  failure_ = why;
  events_.link_failed(failure_);
}

/// A collective in flight can't be cancelled, and would write its caller's memory. MPI has no thread that does so:
/// without further calls the memory stays as it is.
void MpiLink::stop() noexcept {
  if (!failure_.empty()) return;
  failure_ = "an operation failed in MPI";
  close(CloseMode::abortive);
  events_.link_failed(failure_);
}

void MpiLink::post_receive(std::size_t at) noexcept {
  good(MPI_Irecv(&(*arriving_)[at], static_cast<int>(sizeof(AmBuffer)), MPI_BYTE, MPI_ANY_SOURCE, kAmTag, ranks_.comm,
                 &receives_[at]));
}

void MpiLink::send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept {
  if (!failure_.empty()) return;
  if (free_.empty()) free_.push_back(std::make_unique<AmBuffer>());
  std::unique_ptr<AmBuffer> am = std::move(free_.back());
  free_.pop_back();
  am->header = header;
  if (!payload.empty()) std::memcpy(am->payload, payload.data(), payload.size());
  MPI_Request request = MPI_REQUEST_NULL;
  const int bytes = static_cast<int>(sizeof(AmHeader) + payload.size());
  good(MPI_Isend(am.get(), bytes, MPI_BYTE, ranks_.mpi_rank[static_cast<std::size_t>(peer)], kAmTag, ranks_.comm,
                 &request));
  sending_.push_back(std::move(am));
  sends_.push_back(request);
}

/// Reclaims the active messages that MPI has sent. Most complete in the order of submission.
void MpiLink::retire_ams() noexcept {
  std::size_t left = 0;
  for (int done = 1; left < sends_.size(); ++left) {
    if (!good(MPI_Test(&sends_[left], &done, MPI_STATUS_IGNORE)) || done == 0) break;
    free_.push_back(std::move(sending_[left]));
  }
  sends_.erase(sends_.begin(), sends_.begin() + static_cast<std::ptrdiff_t>(left));
  sending_.erase(sending_.begin(), sending_.begin() + static_cast<std::ptrdiff_t>(left));
}

bool MpiLink::receive_ams() noexcept {
  bool moved = false;
  for (int i = 0; i < kAmsPerPoll; ++i) {
    int done = 0;
    MPI_Status status;
    if (!good(MPI_Test(&receives_[next_receive_], &done, &status)) || done == 0) return moved;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    const AmBuffer& am = (*arriving_)[next_receive_];
    const auto payload = static_cast<std::size_t>(bytes) - sizeof(AmHeader);
    events_.on_am(am.header, {am.payload, payload});
    post_receive(next_receive_);
    next_receive_ = (next_receive_ + 1) % kReceives;
    moved = true;
  }
  return moved;
}

void MpiLink::start_bulk(Message& message, std::uint64_t slot, bool receives) noexcept {
  if (!failure_.empty()) return;
  bulk_.push_back({.message = &message, .slot = slot, .receives = receives});
  bulk_requests_.push_back(start_part(bulk_.back()));
}

/// Submits one part at a time: the parts of a slot have one tag, and MPI keeps their order.
MPI_Request MpiLink::start_part(BulkTransfer& bulk) noexcept {
  MPI_Request request = MPI_REQUEST_NULL;
  const Message& message = *bulk.message;
  bulk.part = std::min(message.bytes - bulk.moved, max_chunk_);
  const int peer = ranks_.mpi_rank[static_cast<std::size_t>(message.peer)];
  const int count = static_cast<int>(bulk.part);
  const int tag = 1 + static_cast<int>(bulk.slot % static_cast<std::uint64_t>(ranks_.largest_tag));
  std::byte* const data = message.data + bulk.moved;
  good(bulk.receives ? MPI_Irecv(data, count, MPI_BYTE, peer, tag, ranks_.comm, &request)
                     : MPI_Isend(data, count, MPI_BYTE, peer, tag, ranks_.comm, &request));
  return request;
}

void MpiLink::remove_bulk(std::size_t at) noexcept {
  bulk_[at] = bulk_.back();
  bulk_.pop_back();
  bulk_requests_[at] = bulk_requests_.back();
  bulk_requests_.pop_back();
}

bool MpiLink::move_bulk() noexcept {
  if (bulk_.empty()) return false;
  int ended = 0;
  done_.resize(bulk_.size());
  if (!good(MPI_Testsome(static_cast<int>(bulk_.size()), bulk_requests_.data(), &ended, done_.data(),
                         MPI_STATUSES_IGNORE)))
    return false;
  if (ended <= 0) return false;                                       // also MPI_UNDEFINED
  std::sort(done_.begin(), done_.begin() + ended, std::greater<>());  // removing one moves only later ones
  std::vector<Message*> through;
  for (int i = 0; i < ended; ++i) {
    const auto at = static_cast<std::size_t>(done_[static_cast<std::size_t>(i)]);
    BulkTransfer& bulk = bulk_[at];
    bulk.moved += bulk.part;
    if (bulk.moved < bulk.message->bytes) {
      bulk_requests_[at] = start_part(bulk);
      continue;
    }
    through.push_back(bulk.message);
    remove_bulk(at);
  }
  for (Message* message : through) events_.bulk_done(*message);
  return true;
}

/// Tests a request until it completes. False: not in time.
bool MpiLink::end_request(MPI_Request& request, MPI_Status& status, Clock::time_point until) noexcept {
  for (int done = 0;; ::sched_yield()) {
    if (!good(MPI_Test(&request, &done, &status))) return false;
    if (done != 0) return true;
    if (Clock::now() >= until) return false;
  }
}

/// MPI guarantees that a cancelled receive completes, without or with its message. A send completes when its receiver
/// has it, and that receiver has requested it.
Link::CancelResult MpiLink::cancel_bulk(Message& message) noexcept {
  const auto found = std::ranges::find_if(bulk_, [&](const BulkTransfer& b) { return b.message == &message; });
  if (found == bulk_.end() || !failure_.empty()) return CancelResult::unsafe;
  const auto at = static_cast<std::size_t>(found - bulk_.begin());
  const auto until = Clock::now() + kPatience;
  MPI_Status status;
  while (true) {
    BulkTransfer& bulk = bulk_[at];
    if (bulk.receives && bulk.moved == 0) MPI_Cancel(&bulk_requests_[at]);
    if (!end_request(bulk_requests_[at], status, until)) return CancelResult::unsafe;
    int cancelled = 0;
    if (bulk.receives) MPI_Test_cancelled(&status, &cancelled);
    bulk.moved += bulk.part;
    const bool whole = bulk.moved == message.bytes;
    if (cancelled == 0 && !whole) {
      bulk_requests_[at] = start_part(bulk);
      continue;
    }
    remove_bulk(at);
    return cancelled != 0 ? CancelResult::not_started : CancelResult::completed;
  }
}

bool MpiLink::poll(bool) noexcept {
  if (!failure_.empty() || ranks_.comm == MPI_COMM_NULL) return false;
  std::optional<base::FpEnvironment> environment;  // any call may reduce for MPI's collectives
  if (!collectives_.idle()) environment.emplace();
  bool moved = collectives_.poll();
  moved |= receive_ams();
  moved |= move_bulk();
  if (!sends_.empty()) retire_ams();
  if (moved) waiter_.on_progress();
  waiter_.set_collective_in_flight(!collectives_.idle());
  return moved;
}

void MpiLink::close(CloseMode how) noexcept {
  if (std::exchange(closed_, true) || ranks_.comm == MPI_COMM_NULL) return;
  collectives_.close(how == CloseMode::abortive || !failure_.empty());
  const auto until = Clock::now() + kClosing;
  MPI_Status status;
  for (std::size_t i = 0; i < sends_.size() && how != CloseMode::abortive && failure_.empty(); ++i)
    if (!end_request(sends_[i], status, until)) failure_ = "the last messages were not received within 5 s";
  if (how == CloseMode::abortive && failure_.empty()) failure_ = "a rank was lost, or did not finish a message";
  if (failure_.empty()) {
    std::vector<MPI_Request> unwanted(receives_.begin(), receives_.end());
    unwanted.insert(unwanted.end(), bulk_requests_.begin(), bulk_requests_.end());
    for (MPI_Request& request : unwanted) {
      MPI_Cancel(&request);
      if (!end_request(request, status, until)) break;
    }
  }
  close_ranks(ranks_, how != CloseMode::graceful, failure_);
  if (failure_.empty()) return;
  // MPI may still access these.
  for (std::unique_ptr<AmBuffer>& am : sending_) [[maybe_unused]] const AmBuffer* leaked = am.release();
  [[maybe_unused]] const auto* leaked = arriving_.release();
}

}  // namespace tessera::comm::mpi
