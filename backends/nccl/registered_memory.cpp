#include "backends/nccl/registered_memory.h"

#include <algorithm>
#include <span>
#include <utility>

#include "backends/nccl/nccl_group.h"
#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::nccl {
namespace {

/// NCCL's allocator works in steps of this size; a smaller block is not worth a registration.
constexpr std::size_t kRegisteredFrom = std::size_t{2} << 20;

}  // namespace

Buffer RegisteredMemory::allocate(std::size_t bytes, MemoryCategory use,
                                  std::shared_ptr<MemoryTracker> memory_tracker) {
  const DeviceGuard guard(api_, device_);
  const bool registered = registers(bytes);
  void* data = nullptr;
  std::string problem;
  if (registered) {
    const ncclResult_t result = api_.ncclMemAlloc(&data, bytes);
    if (result != ncclSuccess) problem = api_.ncclGetErrorString(result);
  } else {
    const cudaError_t error = api_.cudaMalloc(&data, std::max(bytes, kAlignment));
    if (error != cudaSuccess) problem = api_.cudaGetErrorString(error);
  }
  if (!problem.empty()) {
    api_.cudaGetLastError();
    throw SystemError("nccl: can't allocate " + std::to_string(bytes) + " bytes on device " + std::to_string(device_) +
                      ": " + problem);
  }
  if (registered) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_[data];
    block.bytes = bytes;
    for (NcclGroup* group : groups_) enter(*group, data, block);
  }
  if (memory_tracker != nullptr) memory_tracker->add(use, bytes);
  return {
      data, bytes,
      [self = shared_from_this(), use, memory_tracker = std::move(memory_tracker), registered](void* p, std::size_t n) {
        self->release(p, registered);
        if (memory_tracker != nullptr) memory_tracker->remove(use, n);
      }};
}

bool RegisteredMemory::registers(std::size_t bytes) const { return api_.registers() && bytes >= kRegisteredFrom; }

void RegisteredMemory::add_window(NcclGroup& group, void* data, Window window) {
  const std::lock_guard lock(mutex_);
  blocks_[data].windows[&group] = window;
}

std::vector<std::uint64_t> RegisteredMemory::windows_of(NcclGroup& group) {
  std::vector<std::uint64_t> numbers;
  const std::lock_guard lock(mutex_);
  for (const auto& [data, block] : blocks_)
    if (const auto found = block.windows.find(&group); found != block.windows.end())
      numbers.push_back(found->second.number);
  std::ranges::sort(numbers);
  return numbers;
}

std::string RegisteredMemory::describe_place(NcclGroup& group, const void* data) {
  const std::lock_guard lock(mutex_);
  auto after = blocks_.upper_bound(const_cast<void*>(data));
  if (after == blocks_.begin()) return "";
  const auto& [begin, block] = *--after;
  const auto offset = static_cast<const std::byte*>(data) - static_cast<const std::byte*>(begin);
  const auto found = block.windows.find(&group);
  if (found == block.windows.end() || static_cast<std::size_t>(offset) >= block.bytes) return "";
  return "window " + std::to_string(found->second.number) + " + " + std::to_string(offset) + " bytes";
}

void RegisteredMemory::enter(NcclGroup& group, void* data, Block& block) {
  if (void* handle = group.register_memory(data, block.bytes)) block.handles[&group] = handle;
}

void RegisteredMemory::release(void* data, bool registered) noexcept {
  const DeviceGuard guard(api_, device_, std::nothrow);
  if (registered) {
    const std::lock_guard lock(mutex_);
    for (const auto& [group, window] : blocks_[data].windows) group->deregister_window(window.handle);
    for (const auto& [group, handle] : blocks_[data].handles) group->deregister_memory(handle);
    blocks_.erase(data);
  }
  if (abandoned_->any()) return;
  if (registered)
    api_.ncclMemFree(data);
  else
    api_.cudaFree(data);
}

void RegisteredMemory::add(NcclGroup& group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(&group);
  for (auto& [data, block] : blocks_) enter(group, data, block);
}

void RegisteredMemory::remove(NcclGroup& group) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(groups_, &group);
  for (auto& [data, block] : blocks_) {
    if (const auto window = block.windows.extract(&group)) group.deregister_window(window.mapped().handle);
    const auto found = block.handles.find(&group);
    if (found == block.handles.end()) continue;
    group.deregister_memory(found->second);
    block.handles.erase(found);
  }
}

using namespace std::chrono_literals;
namespace {

/// Where a rank could not make its window, the others fail as well, or wait for it inside NCCL, which only an abort
/// ends. They get this long.
constexpr auto kOthersFailWithin = 5s;

}  // namespace

Buffer SymmetricAllocator::allocate(std::size_t bytes, MemoryCategory use,
                                    std::shared_ptr<MemoryTracker> memory_tracker) {
  group_.throw_if_failed();
  NcclRuntime& runtime = group_.runtime();
  RegisteredMemory& memory = runtime.memory();
  if (has_windows_ && !runtime.no_windows().empty()) use_no_windows(runtime.no_windows());
  if (group_.size() == 1 || !has_windows_) return memory.allocate(bytes, use, std::move(memory_tracker));
  const Clock::time_point until = Clock::now() + group_.timeout();
  const std::vector<Vote> votes = exchange({.bytes = bytes, .windows = describe_windows()}, until);
  compare_sizes(votes);
  compare_windows(votes);
  if (!memory.registers(bytes)) return memory.allocate(bytes, use, std::move(memory_tracker));
  Buffer buffer;
  std::string problem;
  try {
    buffer = memory.allocate(bytes, use, std::move(memory_tracker));
  } catch (const SystemError& error) {
    problem = error.what();
  }
  exchange_problems({bytes, problem}, until);
  if (!problem.empty()) throw SystemError(problem);
  return has_windows_ ? make_window(std::move(buffer), until) : std::move(buffer);
}

/// "COUNT:FINGERPRINT" of the windows that this rank has not released.
std::string SymmetricAllocator::describe_windows() {
  const std::vector<std::uint64_t> numbers = group_.runtime().memory().windows_of(group_);
  return std::to_string(numbers.size()) + ":" + std::to_string(base::checksum(std::as_bytes(std::span(numbers))));
}

void SymmetricAllocator::compare_windows(std::span<const Vote> votes) {
  const auto other =
      std::ranges::find_if(votes, [&](const Vote& vote) { return vote.windows != votes.front().windows; });
  if (other == votes.end()) return;
  const auto describe = [&](const Vote& vote) {
    return group_.rank_name(static_cast<int>(&vote - votes.data())) + " has " +
           vote.windows.substr(0, vote.windows.find(':')) + " left";
  };
  group_.fail(
      {FailureKind::mismatch, "allocate_symmetric: the ranks have not released the same buffers of earlier calls: " +
                                  describe(votes.front()) + ", " + describe(*other)},
      true);
  group_.throw_if_failed();
}

void SymmetricAllocator::compare_sizes(std::span<const Vote> votes) {
  const auto differs = [&](const Vote& vote) { return vote.bytes != votes.front().bytes; };
  if (std::ranges::none_of(votes, differs)) return;
  std::string text = "allocate_symmetric: the ranks need different sizes:";
  for (std::size_t k = 0; k < votes.size(); ++k)
    text +=
        (k > 0 ? ", " : " ") + group_.rank_name(static_cast<int>(k)) + " " + std::to_string(votes[k].bytes) + " bytes";
  group_.fail({FailureKind::mismatch, text}, true);
  group_.throw_if_failed();
}

Buffer SymmetricAllocator::make_window(Buffer buffer, Clock::time_point until) {
  // NCCL's call shares the memory: it may last longer than this function, until an abort has ended it.
  const auto memory = std::make_shared<Buffer>(std::move(buffer));
  void* window = nullptr;
  std::string problem;
  try {
    window = group_.register_window(memory, until);
    if (window == nullptr) problem = "NCCL offers no symmetric window between these devices";
  } catch (const BackendError& error) {
    group_.throw_if_failed();
    problem = error.what();
  } catch (const Timeout&) {
    group_.fail({FailureKind::timeout,
                 "allocate_symmetric: ncclCommWindowRegister was not done within " + format_duration(group_.timeout())},
                true);
    group_.throw_if_failed();
  }
  exchange_problems({memory->bytes(), problem},
                    problem.empty() ? until : std::min(until, Clock::now() + kOthersFailWithin));
  if (has_windows_) {
    group_.runtime().memory().add_window(group_, memory->data(), {window, ++windows_});
  } else if (window != nullptr) {
    group_.deregister_window(window);
  }
  return std::move(*memory);
}

/// One rank's problem keeps all from using windows.
void SymmetricAllocator::exchange_problems(const Vote& mine, Clock::time_point until) {
  for (const Vote& vote : exchange(mine, until))
    if (has_windows_ && !vote.problem.empty()) use_no_windows(vote.problem);
}

/// Returns the votes of all members in the next step. Fails the group, and throws, if one of them closes it or does not
/// vote by `until`.
std::vector<SymmetricAllocator::Vote> SymmetricAllocator::exchange(const Vote& mine, Clock::time_point until) {
  const std::uint64_t step = ++step_;
  NcclRuntime& runtime = group_.runtime();
  const ControlMessage message{.kind = ControlMessage::Kind::symmetric,
                               .from = runtime.rank(),
                               .communicator = group_.id(),
                               .number = step,
                               .value = mine.bytes,
                               .text = mine.windows + " " + mine.problem};
  runtime.monitor().send(group_.members(), message);
  on_vote(group_.rank(), message);
  for (Backoff pause; true; pause(1ms)) {
    group_.throw_if_failed();
    const std::optional<int> missing = absent(step);
    if (!missing) break;
    const int member = *missing;
    const std::string prefix = "allocate_symmetric of " + std::to_string(mine.bytes) + " bytes: ";
    if (group_.has_closed(member) && absent(step) == missing) {
      group_.fail({FailureKind::peer_lost, prefix + group_.rank_name(member) + " has closed its communicator"}, true);
    } else if (Clock::now() >= until) {
      const std::string what = mine.problem.empty() ? " has not called it in time"
                                                    : " waits inside NCCL, where " + group_.rank_name(group_.rank()) +
                                                          " has failed: " + mine.problem;
      group_.fail({FailureKind::timeout, prefix + group_.rank_name(member) + what}, true);
    }
  }
  const std::lock_guard lock(mutex_);
  std::vector<Vote> votes;
  auto node = votes_.extract(step);
  for (auto& [member, vote] : node.mapped()) votes.push_back(std::move(vote));
  return votes;
}

/// The first member that has not voted in this step; none: all have.
std::optional<int> SymmetricAllocator::absent(std::uint64_t step) const {
  const std::lock_guard lock(mutex_);
  const auto found = votes_.find(step);
  for (int k = 0; k < group_.size(); ++k)
    if (found == votes_.end() || !found->second.contains(k)) return k;
  return std::nullopt;
}

void SymmetricAllocator::on_vote(int member, const ControlMessage& message) {
  const std::size_t space = std::min(message.text.find(' '), message.text.size());
  const std::size_t rest = std::min(space + 1, message.text.size());
  const std::lock_guard lock(mutex_);
  votes_[message.number][member] = {message.value, message.text.substr(rest), message.text.substr(0, space)};
}

void SymmetricAllocator::use_no_windows(const std::string& why) {
  has_windows_ = false;
  group_.runtime().report_no_windows(why);
}

}  // namespace tessera::comm::nccl
