#include "tessera/comm/slow_link/call_times.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <string>

#include "tessera/base/file.h"

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

}  // namespace tessera::comm
