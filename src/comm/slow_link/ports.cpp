#include "tessera/comm/slow_link/ports.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "tessera/base/file.h"
#include "tessera/comm/traffic.h"

namespace tessera::comm {
namespace {

constexpr std::uint64_t kCalls = 256;  // that are kept of each rank
constexpr int kTimeBits = 56;          // of an entry; above them is how often its place was used

constexpr std::uint64_t round_of(std::uint64_t call) { return (call / kCalls + 1) & 0xff; }

/// Where rank 0's memory is, for the processes of its host.
struct Place {
  std::int64_t process = 0;
  std::int64_t file = -1;
  std::uint64_t key = 0;  // at the start of the memory: on another host the process may be a different one
};

void* map(int file, std::size_t bytes) {
  if (file < 0) return nullptr;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

base::UniqueFd create(std::size_t bytes) {
  base::UniqueFd file(::memfd_create("tessera call times", MFD_CLOEXEC));
  if (file && ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) file.reset();
  return file;
}

using std::chrono::nanoseconds;

/// Elements of the parts' sizes that go from one rank to another: equal parts, or those of a _v form.
std::uint64_t bytes_between(const OpDesc& call, const Route& route) {
  const std::size_t element = size_of(call.out.count > 0 ? call.out.dtype : call.in.dtype);
  const auto from = static_cast<std::size_t>(route.rank);
  const auto to = static_cast<std::size_t>(route.peer);
  const bool parts = !call.in_counts.empty() || !call.out_counts.empty();
  switch (call.kind) {
    case OpKind::all_gather:
      if (parts) return call.out_counts[from] * element;
      break;
    case OpKind::gather:
      if (parts) return route.peer == route.root ? call.out_counts[from] * element : 0;
      break;
    case OpKind::reduce_scatter:
      if (parts) return call.in_counts[to] * element;
      break;
    case OpKind::scatter:
      if (parts) return route.rank == route.root ? call.in_counts[to] * element : 0;
      break;
    default:
      break;
  }
  std::uint64_t count = std::max(call.in.count, call.out.count);
  if (call.kind == OpKind::gather && call.out.count == 0) count = call.in.count * static_cast<std::size_t>(route.ranks);
  if (call.kind == OpKind::scatter && call.in.count == 0)
    count = call.out.count * static_cast<std::size_t>(route.ranks);
  return direct_bytes_to(call.kind, count, element, route);
}

/// Messages in a row: an all_reduce reduces and then gathers.
int rounds_of(OpKind kind, int ranks) {
  if (kind == OpKind::barrier) return std::bit_width(static_cast<unsigned>(ranks - 1));
  return kind == OpKind::all_reduce ? 2 : 1;
}

class Uses {
 public:
  explicit Uses(const LinkedGroup& group) : group_(group), ranks_(static_cast<int>(group.members.size())) {}

  void add(const OpDesc& call) {
    const bool message = call.kind == OpKind::send || call.kind == OpKind::recv;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == group_.rank || (message && peer != call.root)) continue;
      const std::size_t port = port_to(peer);
      farthest_ = std::max(farthest_, port);
      const std::uint64_t sent = call.kind == OpKind::send ? call.in.bytes() : to(call, group_.rank, peer);
      const std::uint64_t received = call.kind == OpKind::recv ? call.out.bytes() : to(call, peer, group_.rank);
      sent_[port] += static_cast<double>(sent);
      received_[port] += static_cast<double>(received);
      if (!message && (received > 0 || call.kind == OpKind::barrier)) senders_.push_back(peer);
    }
    rounds_ = std::max(rounds_, rounds_of(call.kind, ranks_));
  }

  PortUse result() const {
    PortUse use{.occupied = {}, .latency = link(farthest_).latency * rounds_, .senders = senders_};
    for (std::size_t port = 0; port < kPorts; ++port)
      use.occupied[port] =
          nanoseconds(std::llround(std::max(sent_[port], received_[port]) / link(port).bytes_per_second * 1e9));
    return use;
  }

 private:
  int host_of(int member) const {
    return group_.members[static_cast<std::size_t>(member)] / (group_.world_size / group_.links.hosts);
  }
  std::size_t port_to(int peer) const { return host_of(peer) == host_of(group_.rank) ? 0 : 1; }
  const SlowLink& link(std::size_t port) const {
    return port == 0 && group_.links.hosts > 1 ? group_.links.intra : group_.links.link;
  }
  /// Of a collective.
  std::uint64_t to(const OpDesc& call, int from, int peer) const {
    if (call.kind == OpKind::all_to_all && !call.in_counts.empty())
      return static_cast<std::uint64_t>(from == group_.rank ? call.in_counts[static_cast<std::size_t>(peer)]
                                                            : call.out_counts[static_cast<std::size_t>(from)]) *
             size_of(call.in.dtype);
    if (call.kind == OpKind::send || call.kind == OpKind::recv) return 0;
    return bytes_between(call, {.ranks = ranks_, .rank = from, .peer = peer, .root = call.root});
  }

  const LinkedGroup& group_;
  const int ranks_;
  std::array<double, kPorts> sent_{}, received_{};
  std::vector<int> senders_;
  std::size_t farthest_ = 0;
  int rounds_ = 0;
};

}  // namespace

struct CallTimes::Header {
  std::uint64_t key;
};

CallTimes::CallTimes(Communicator& communicator)
    : rank_(communicator.rank()),
      bytes_((kCalls * static_cast<std::size_t>(communicator.size()) + 1) * sizeof(std::uint64_t)) {
  if (communicator.size() > 1) attach(communicator);
}

CallTimes::~CallTimes() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

void CallTimes::attach(Communicator& communicator) {
  static_assert(sizeof(Header) == sizeof(std::uint64_t) && std::atomic<std::uint64_t>::is_always_lock_free);
  const base::UniqueFd own = rank_ == 0 ? create(bytes_) : base::UniqueFd();
  Place place{.process = ::getpid(), .file = own.get()};
  if (rank_ == 0 && (memory_ = map(own.get(), bytes_)) != nullptr) {
    place.key = std::random_device()() | std::uint64_t{1} << 32;
    static_cast<Header*>(memory_)->key = place.key;
  }
  const View view{&place, sizeof(place), DType::u8, {}};
  communicator.broadcast(view, view, 0, {.label = "slow link"}).wait();
  if (rank_ != 0 && place.key != 0) {
    const std::string path = "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
    const base::UniqueFd theirs(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    // A file that is too short would fault: sizes are compared before anything is read.
    if (::lseek(theirs.get(), 0, SEEK_END) == static_cast<off_t>(bytes_)) memory_ = map(theirs.get(), bytes_);
  }
  std::uint8_t all_share = memory_ != nullptr && static_cast<Header*>(memory_)->key == place.key;
  const View vote = view_of(&all_share, 1);
  communicator.all_reduce(vote, vote, ReduceOp::min(), {.label = "slow link"}).wait();
  if (all_share != 0) times_ = reinterpret_cast<std::atomic<std::uint64_t>*>(static_cast<Header*>(memory_) + 1);
}

std::atomic<std::uint64_t>& CallTimes::entry(int rank, std::uint64_t call) const noexcept {
  return times_[static_cast<std::uint64_t>(rank) * kCalls + call % kCalls];
}

void CallTimes::record(std::uint64_t call, TimePoint time) noexcept {
  if (times_ == nullptr) return;
  const auto ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
  entry(rank_, call).store(round_of(call) << kTimeBits | ns, std::memory_order_release);
}

std::optional<CallTimes::TimePoint> CallTimes::last(std::uint64_t call, std::span<const int> ranks) const noexcept {
  TimePoint last{};
  if (times_ == nullptr) return last;
  for (const int rank : ranks) {
    const std::uint64_t value = entry(rank, call).load(std::memory_order_acquire);
    const std::uint64_t rounds_ahead = ((value >> kTimeBits) - round_of(call)) & 0xff;
    if (rounds_ahead >= 128) return std::nullopt;
    if (rounds_ahead > 0) continue;
    const auto ns = static_cast<std::int64_t>(value & ((std::uint64_t{1} << kTimeBits) - 1));
    last = std::max(last, TimePoint(std::chrono::nanoseconds(ns)));
  }
  return last;
}

void Ports::add(std::shared_ptr<Transfer> transfer) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(transfer));
  serve();
}

void Ports::remove(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [&](const auto& one) { return one.get() == &transfer; });
}

std::optional<CallTimes::TimePoint> Ports::done_at(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  serve();
  return transfer.done;
}

/// Those that all ranks have called, in the order of their last calls; the others come later.
void Ports::serve() {
  std::vector<std::pair<CallTimes::TimePoint, Transfer*>> come;
  for (const auto& transfer : waiting_) {
    const auto last = transfer->times == nullptr ? std::optional(transfer->called)
                                                 : transfer->times->last(transfer->number, transfer->use.senders);
    if (last) come.emplace_back(std::max(*last, transfer->called), transfer.get());
  }
  std::ranges::stable_sort(come, [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [time, transfer] : come) {
    transfer->begun = time;
    CallTimes::TimePoint through = time;
    for (std::size_t port = 0; port < kPorts; ++port) {
      if (transfer->use.occupied[port].count() == 0) continue;
      free_[port] = std::max(time, free_[port]) + transfer->use.occupied[port];
      through = std::max(through, free_[port]);
    }
    transfer->done = through + transfer->use.latency;
  }
  std::erase_if(waiting_, [](const auto& transfer) { return transfer->done.has_value(); });
}

PortUse port_use(const LinkedGroup& group, std::span<const OpDesc> calls) {
  Uses uses(group);
  for (const OpDesc& call : calls) uses.add(call);
  return uses.result();
}

}  // namespace tessera::comm
