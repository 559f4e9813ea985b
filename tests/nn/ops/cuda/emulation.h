// Emulates blocks and threads of a GPU in plain C++, so that the kernels of src/nn/kernels/cuda run in a CPU test:
// include this before them.
//
// Blocks run one after the other, from either end. The threads of a block are fibers that run one after the other from
// barrier to barrier, in an order that the test chooses: a kernel whose result depends on the order lacks a barrier.
// Shared memory is poisoned before every block, and writes beyond its end are detected. Asynchronous copies arrive as
// late as a GPU may let them. A wait that can't end, also one for a later block, is a Failure. The emulation does not
// detect: races between blocks; races inside a warp that no chosen order reveals (a shuffle orders memory here; on a
// GPU only a barrier does); bank conflicts; misalignment of ordinary accesses; and time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/nn/ops/cuda/emulated_copies.h"

#define TESSERA_EMULATED_CUDA 1
#define TESSERA_DEVICE inline
#define TESSERA_KERNEL
#define TESSERA_BOUNDED_KERNEL(threads, blocks)
#define TESSERA_PLAIN_KERNEL inline
#define TESSERA_BOTH inline
#define TESSERA_UNROLL
#define TESSERA_NO_UNROLL
#define TESSERA_UNROLL_BY_8
#define TESSERA_GRID_CONSTANT

namespace tessera::emulation {

/// Order of the threads of a block: each runs to its next barrier before any continues, from the first or from the
/// last; or each warp runs as far as it can before another begins, and so reaches data that slower warps have not yet
/// read or written. Blocks run from the first to the last, or as their threads, from the last.
enum class Order { ascending, descending, first_warp_ahead, last_warp_ahead };
inline constexpr int kOrders = 4;

class Block;

class Thread {
 public:
  explicit Thread(Block& block) : block_(block), stack_(kStack) {}
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  enum class State { ready, at_block, at_warp, done };
  State state = State::ready;
  std::array<std::uint64_t, 2> slots{};  // values of the last two exchanges; no lane reads an older one
  std::size_t exchanges = 0;
  AsyncCopies copies;

  void restart();
  /// Runs to its next barrier or its end.
  void resume();
  void wait(State where);

 private:
  static constexpr std::size_t kStack = 64 * 1024;
  static void enter(unsigned low, unsigned high);
  Block& block_;
  std::vector<char> stack_;
  ucontext_t context_{};
  jmp_buf inside_, outside_;
  bool begun_ = false;
};

/// A block of threads; runs one block at a time; one object per test thread.
class Block {
 public:
  static constexpr unsigned kWarp = 32;
  static constexpr std::size_t kGuard = 256;

  Order order = Order::ascending;
  std::size_t index = 0, blocks = 0;
  unsigned current = 0, count = 0;
  std::function<void()> body;
  std::exception_ptr failure;  ///< of a thread

  void run(std::size_t block_count, unsigned threads, std::size_t shared_bytes, std::function<void()> kernel) {
    if (threads == 0 || threads > 1024) throw Failure("a block of " + std::to_string(threads) + " threads");
    if (shared_bytes > 163 * 1024)  // what the oldest generation has
      throw Failure(std::to_string(shared_bytes) + " bytes of shared memory");
    blocks = block_count;
    count = threads;
    body = std::move(kernel);
    while (threads_.size() < threads) threads_.push_back(std::make_unique<Thread>(*this));
    const bool backwards = order == Order::descending || order == Order::last_warp_ahead;
    for (std::size_t step = 0; step < blocks; ++step) {
      index = backwards ? blocks - 1 - step : step;
      run_block(shared_bytes);
    }
  }

  void* shared() { return shared_.data() + kGuard; }
  Thread& thread() { return *threads_[current]; }
  /// The value that another lane of the current thread's warp exchanges.
  std::uint64_t slot_of(unsigned lane, std::size_t exchange) const {
    const unsigned other = current / kWarp * kWarp + lane;
    if (other >= count) throw Failure("a shuffle with a lane that there isn't");
    return threads_[other]->slots[exchange % 2];
  }

 private:
  using State = Thread::State;

  void run_block(std::size_t shared_bytes) {
    shared_.assign(shared_bytes + 2 * kGuard, static_cast<char>(0xFF));
    failure = nullptr;
    for (unsigned t = 0; t < count; ++t) threads_[t]->restart();
    while (!all(0, count, State::done)) {
      const bool ahead = order == Order::first_warp_ahead || order == Order::last_warp_ahead;
      const bool ran = ahead ? run_warps() : run_threads(0, count);
      if (failure) std::rethrow_exception(failure);
      const bool opened = open_barriers();
      if (!ran && !opened) throw Failure("block " + std::to_string(index) + " hangs: " + described());
    }
    for (std::size_t i = 0; i < kGuard; ++i)
      if (shared_[i] != static_cast<char>(0xFF) || shared_[shared_bytes + kGuard + i] != static_cast<char>(0xFF))
        throw Failure("block " + std::to_string(index) + " wrote beyond its shared memory");
  }

  /// Runs the ready threads of [begin, end), each to its next barrier. False if none was ready.
  bool run_threads(unsigned begin, unsigned end) {
    bool ran = false;
    const bool backwards = order == Order::descending || order == Order::last_warp_ahead;
    for (unsigned step = 0; step < end - begin; ++step) {
      current = backwards ? end - 1 - step : begin + step;
      if (threads_[current]->state != State::ready) continue;
      threads_[current]->resume();
      ran = true;
    }
    return ran;
  }
  /// Runs one warp after the other, each until it reaches a block barrier.
  bool run_warps() {
    bool ran = false;
    const unsigned warps = (count + kWarp - 1) / kWarp;
    for (unsigned step = 0; step < warps; ++step) {
      const unsigned begin = (order == Order::last_warp_ahead ? warps - 1 - step : step) * kWarp;
      const unsigned end = std::min(count, begin + kWarp);
      while (run_threads(begin, end)) {
        ran = true;
        if (all(begin, end, State::at_warp)) release(begin, end);
      }
    }
    return ran;
  }

  bool all(unsigned begin, unsigned end, State state) const {
    for (unsigned t = begin; t < end; ++t)
      if (threads_[t]->state != state) return false;
    return true;
  }
  void release(unsigned begin, unsigned end) {
    for (unsigned t = begin; t < end; ++t) threads_[t]->state = State::ready;
  }
  /// A barrier opens when all its threads have arrived; a thread that has returned never arrives.
  bool open_barriers() {
    bool opened = false;
    for (unsigned begin = 0; begin < count; begin += kWarp) {
      const unsigned end = std::min(count, begin + kWarp);
      if (!all(begin, end, State::at_warp)) continue;
      release(begin, end);
      opened = true;
    }
    if (!all(0, count, State::at_block)) return opened;
    release(0, count);
    return true;
  }
  std::string described() const {
    std::array<int, 4> counts{};
    for (unsigned t = 0; t < count; ++t) ++counts[static_cast<std::size_t>(threads_[t]->state)];
    return std::to_string(counts[1]) + " threads wait for the block, " + std::to_string(counts[2]) +
           " for their warp, " + std::to_string(counts[3]) + " have left";
  }

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<char> shared_;
};

inline Block& block() {
  thread_local Block block;
  return block;
}

inline void Thread::restart() {
  // A fiber that has ended goes on with the next block; one that a failure stopped on its way begins anew.
  if (state != State::done) begun_ = false;
  state = State::ready;
  exchanges = 0;
  copies.clear();
}

inline void Thread::enter(unsigned low, unsigned high) {
  auto* self = reinterpret_cast<Thread*>(std::uintptr_t{low} | std::uintptr_t{high} << 32);  // NOLINT
  while (true) {  // a block each: to begin a fiber takes system calls
    try {
      self->block_.body();
      if (self->copies.pending()) throw Failure("a thread leaves without waiting for its asynchronous copies");
    } catch (...) {
      self->block_.failure = std::current_exception();
    }
    self->wait(State::done);
  }
}

/// longjmp without the check of _FORTIFY_SOURCE, which some compilers turn on, and which takes a jump to another stack
/// for a mistake.
extern "C" [[noreturn]] void jump_to_stack(jmp_buf where, int value) __asm__("_longjmp");

inline void Thread::resume() {
  if (_setjmp(outside_) != 0) return;
  if (begun_) jump_to_stack(inside_, 1);
  begun_ = true;
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_.data();
  context_.uc_stack.ss_size = stack_.size();
  context_.uc_link = nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Thread::enter), 2, static_cast<unsigned>(address),
              static_cast<unsigned>(address >> 32));
  setcontext(&context_);
}

inline void Thread::wait(State where) {
  state = where;
  if (_setjmp(inside_) == 0) jump_to_stack(outside_, 1);
}

/// Bytes that kernels of this thread read and wrote through load_whole(), store_whole() and asynchronous copies; plain
/// accesses are not counted. With `ranges`, only accesses to these.
class Accesses {
 public:
  std::size_t read = 0, written = 0;
  std::size_t first_read = 0;  ///< bytes of the ranges that were read at least once

  /// Counts accesses to [begin, begin + bytes) too.
  void add_range(const void* begin, std::size_t bytes) { ranges_.push_back({begin, std::vector<bool>(bytes)}); }
  /// Counts all accesses again.
  void clear_ranges() { ranges_.clear(); }
  /// Counts from zero.
  void restart() {
    read = written = first_read = 0;
    for (Range& range : ranges_) range.was_read.assign(range.was_read.size(), false);
  }
  void on_read(const void* at, std::size_t bytes) {
    if (ranges_.empty()) read += bytes;
    for (Range& range : ranges_) {
      const std::size_t offset = range.offset(at);
      if (offset >= range.was_read.size()) continue;
      read += bytes;
      for (std::size_t i = offset; i < offset + bytes && i < range.was_read.size(); ++i) {
        first_read += range.was_read[i] ? 0 : 1;
        range.was_read[i] = true;
      }
    }
  }
  void on_write(const void* at, std::size_t bytes) {
    const auto inside = [at](const Range& range) { return range.offset(at) < range.was_read.size(); };
    if (ranges_.empty() || std::any_of(ranges_.begin(), ranges_.end(), inside)) written += bytes;
  }

 private:
  struct Range {
    const void* begin;
    std::vector<bool> was_read;  ///< for each byte
    std::size_t offset(const void* at) const {
      return reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(begin);
    }
  };
  std::vector<Range> ranges_;
};
inline Accesses& accesses() {
  thread_local Accesses count;
  return count;
}

/// Stream of a launch: called with each launch; null runs the launch at once.
using NativeStream = const std::function<void(const std::function<void()>&)>*;

template <class Grid>
void run(NativeStream stream, const Grid& grid, const std::function<void()>& kernel) {
  const auto launch = [&] { block().run(grid.blocks, grid.threads, grid.shared, kernel); };
  if (stream == nullptr) return launch();
  (*stream)(launch);
}

inline void sync_block() { block().thread().wait(Thread::State::at_block); }

/// The values of the given lanes of the warp. All lanes of the warp must call it.
template <std::size_t lanes, class T>
std::array<T, lanes> from_lanes(T value, const std::array<unsigned, lanes>& wanted) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  Thread& self = block().thread();
  const std::size_t exchange = self.exchanges++;
  std::memcpy(&self.slots[exchange % 2], &value, sizeof(T));
  self.wait(Thread::State::at_warp);
  std::array<T, lanes> values;
  for (std::size_t i = 0; i < lanes; ++i) {
    const std::uint64_t slot = block().slot_of(wanted[i], exchange);
    std::memcpy(&values[i], &slot, sizeof(T));
  }
  return values;
}

/// Like __syncwarp and __match_any_sync of a whole warp.
inline void sync_warp() { block().thread().wait(Thread::State::at_warp); }
inline unsigned lanes_with(unsigned value) {
  std::array<unsigned, Block::kWarp> all{};
  for (unsigned lane = 0; lane < Block::kWarp; ++lane) all[lane] = lane;
  const auto values = from_lanes(value, all);
  unsigned same = 0;
  for (unsigned lane = 0; lane < Block::kWarp; ++lane) same |= values[lane] == value ? 1U << lane : 0U;
  return same;
}

/// Like __shfl_xor_sync of a whole warp.
template <class T>
T shuffle_xor(T value, unsigned mask) {
  return from_lanes<1>(value, {block().current % Block::kWarp ^ mask})[0];
}

inline void copy_async(void* to, const void* from, bool inside) {
  if (inside) accesses().on_read(from, kCopyBytes);
  block().thread().copies.begin(to, from, inside);
}
inline void commit_copies() { block().thread().copies.commit(); }
inline void wait_copies(std::size_t pending) { block().thread().copies.wait(pending); }

/// Like ldmatrix.x4: word i of a lane is elements 2 * (lane % 4) and the next one of row lane / 4 of matrix i, or, of
/// its transpose; lane l passes row l % 8 of matrix l / 8.
template <class T>
void load_matrices(const T* row, bool transposed, std::uint32_t (&words)[4]) {
  static_assert(sizeof(T) == 2);
  check_alignment(row, "ldmatrix");
  const unsigned lane = block().current % Block::kWarp, line = lane / 4, pair = lane % 4 * 2;
  std::array<unsigned, 8> lanes{};  // that pass the two rows with this lane's elements of each matrix
  for (unsigned i = 0; i < 8; ++i) lanes[i] = i / 2 * 8 + (transposed ? pair + i % 2 : line);
  const auto rows = from_lanes<8>(reinterpret_cast<std::uintptr_t>(row), lanes);
  for (unsigned i = 0; i < 8; ++i) {
    std::uint16_t element;
    std::memcpy(&element, reinterpret_cast<const T*>(rows[i]) + (transposed ? line : pair + i % 2), sizeof(element));
    words[i / 2] = i % 2 == 0 ? element : words[i / 2] | static_cast<std::uint32_t>(element) << 16;
  }
}

}  // namespace tessera::emulation
