#include "tessera/base/memory_pool.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tests/harness/limited_device.h"

namespace tessera::base {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

struct Fixture {
  explicit Fixture(MemoryPoolOptions options = {}) : pool(memory_tracker, options) {}
  std::shared_ptr<MemoryTracker> memory_tracker = std::make_shared<MemoryTracker>();
  MemoryPool pool;
  Buffer get(std::size_t bytes) { return pool.allocate(bytes, MemoryCategory::activation); }
};

TEST(Buffer, LastOwnerReleasesOnce) {
  int released = 0;
  int value = 0;
  {
    Buffer a(&value, sizeof value, [&](void* data, std::size_t bytes) {
      EXPECT_EQ(data, &value);
      EXPECT_EQ(bytes, sizeof value);
      ++released;
    });
    Buffer b = std::move(a);
    EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): a moved-from buffer is empty
    EXPECT_EQ(a.bytes(), 0U);
    a = std::move(b);
    EXPECT_EQ(released, 0);
    EXPECT_EQ(a.data(), &value);
  }
  EXPECT_EQ(released, 1);
}

TEST(Pool, AlignsAndTracksEverySize) {
  Fixture f;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{65},
                                  256 * 1024 - std::size_t{1}, std::size_t{256 * 1024}, kMiB + 1, 5 * kMiB}) {
    Buffer buffer = f.get(bytes);
    ASSERT_TRUE(buffer);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kAlignment, 0U);
    EXPECT_EQ(f.memory_tracker->snapshot().now_of(MemoryCategory::activation), bytes);
    if (bytes != 0) std::memset(buffer.data(), 1, bytes);
    buffer.reset();
    EXPECT_EQ(f.memory_tracker->snapshot().total_now, 0U);
  }
}

TEST(Pool, LargeBlocksAreAlignedToHugePages) {
  Fixture f;
  std::vector<Buffer> held;  // one after the other: the memory that the kernel returns first proves little
  for (const std::size_t bytes : {2 * kMiB, 3 * kMiB, 5 * kMiB + 4096, 2 * kMiB, 17 * kMiB}) {
    held.push_back(f.get(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(held.back().data()) % (2 * kMiB), 0U) << bytes;
    std::memset(held.back().data(), 1, bytes);
  }
}

TEST(Pool, ReusesFittingBlocks) {
  Fixture f;
  Buffer a = f.get(kMiB);
  void* const data = a.data();
  a.reset();
  EXPECT_EQ(f.get(kMiB).data(), data);
  EXPECT_EQ(f.get(kMiB - 8192).data(), data) << "wastes less than an eighth";
  Buffer half = f.get(kMiB / 2);
  EXPECT_NE(half.data(), data) << "would waste half of the block";
}

TEST(Pool, LiveBlocksNeverOverlap) {
  Fixture f;
  std::vector<Buffer> live;
  for (int i = 0; i < 8; ++i) {
    live.push_back(f.get(kMiB));
    std::memset(live.back().data(), i, kMiB);
  }
  for (int i = 0; i < 8; ++i) {
    const std::byte* bytes = live[static_cast<std::size_t>(i)].bytes_at(0);
    EXPECT_EQ(std::to_integer<int>(bytes[0]), i);
    EXPECT_EQ(std::to_integer<int>(bytes[kMiB - 1]), i);
  }
}

TEST(Pool, RepeatedStepMapsNothing) {
  Fixture f;
  const auto step = [&] {
    std::vector<void*> seen;
    Buffer a = f.get(3 * kMiB);
    Buffer b = f.get(kMiB);
    seen = {a.data(), b.data()};
    a.reset();
    Buffer c = f.get(3 * kMiB);
    seen.push_back(c.data());
    return seen;
  };
  const auto first = step();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step(), first);
}

/// Page faults of 20 steps that hold 100 buffers of a small model's sizes at once, after the first.
long faults_of_steps(MemoryPoolOptions options) {
  Fixture f(options);
  const auto step = [&] {
    std::vector<Buffer> live;
    for (std::size_t i = 0; i < 100; ++i) {
      const std::size_t bytes = (20 + 2 * (i % 50)) << 10;
      live.push_back(f.get(bytes));
      std::memset(live.back().data(), 1, bytes);
    }
  };
  const auto faults = [] {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
  };
  step();
  const long before = faults();
  for (int i = 0; i < 20; ++i) step();
  return faults() - before;
}

/// The first step has mapped 7 MB.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr long kMostFaults = 500;  // of memory in which the sanitizers keep what the steps have done
#else
constexpr long kMostFaults = 50;
#endif

TEST(Pool, RepeatedStepOfSmallModelFaultsNothing) { EXPECT_LT(faults_of_steps({}), kMostFaults); }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their malloc returns nothing to the system
/// Negative control: without the pool and with a C library that maps each of them, every buffer's pages are new. (By
/// default it trims its heap only where nothing lies above, and the kernel may give the heap huge pages.)
TEST(Pool, DetectsFaultsOfCLibrary) {
  ::mallopt(M_MMAP_THRESHOLD, 16 << 10);
  ::mallopt(M_TOP_PAD, 0);
  ::malloc_trim(0);
  EXPECT_GT(faults_of_steps({.pooled_from = kMiB}), 20'000);
}
#endif

TEST(Pool, IdleMemoryStaysBounded) {
  MemoryPoolOptions options;
  options.slack = 0.02;
  options.slack_bytes = kMiB;
  Fixture f(options);
  for (std::size_t i = 1; i <= 40; ++i)
    f.get(i * kMiB);  // forty sizes, one at a time: no block can be reused for the next size
  const auto s = f.memory_tracker->snapshot();
  EXPECT_EQ(s.total_peak, 40 * kMiB);
  EXPECT_LE(s.reserved, 2 * kMiB);
}

TEST(Pool, DetectsUnboundedIdleMemory) {  // negative control: without the bound the same work keeps all memory
  MemoryPoolOptions options;
  options.slack_bytes = 4096 * kMiB;
  Fixture f(options);
  for (std::size_t i = 1; i <= 40; ++i) f.get(i * kMiB);
  EXPECT_GT(f.memory_tracker->snapshot().reserved, 100 * kMiB);
}

TEST(Pool, UnusedPartOfBlockIsReserved) {
  Fixture f;
  f.get(8 * kMiB);
  f.memory_tracker->reset_peaks();
  f.pool.trim();
  Buffer big = f.get(8 * kMiB);
  big.reset();
  f.memory_tracker->reset_peaks();
  EXPECT_EQ(f.memory_tracker->snapshot().total_peak, 0U);
  const Buffer smaller = f.get(7 * kMiB + kMiB / 2);
  const auto s = f.memory_tracker->snapshot();
  EXPECT_EQ(s.total_peak + s.reserved, 8 * kMiB) << "the whole block is held, however much of it was asked for";
  const Buffer other = f.get(kMiB);  // while the end of the first block is unused
  const auto both = f.memory_tracker->snapshot();
  EXPECT_EQ(both.total_peak + both.reserved, 9 * kMiB);
}

TEST(Pool, TrimReleasesIdleBlocks) {
  Fixture f;
  f.get(16 * kMiB);
  f.pool.trim();
  f.memory_tracker->reset_peaks();
  EXPECT_EQ(f.memory_tracker->snapshot().reserved, 0U);
  f.get(kMiB);
  EXPECT_EQ(f.memory_tracker->snapshot().reserved, 0U);
}

TEST(Pool, PoisonDetectsStaleRead) {
  MemoryPoolOptions options;
  options.poison = true;
  Fixture f(options);
  Buffer buffer = f.get(kMiB);
  auto* stale = static_cast<volatile float*>(buffer.data());
  stale[0] = 1.0F;
  stale[kMiB / sizeof(float) - 1] = 2.0F;
  buffer.reset();  // the pool keeps the pages mapped: the read below accesses idle memory of the pool
  EXPECT_TRUE(std::isnan(stale[0]));
  EXPECT_TRUE(std::isnan(stale[kMiB / sizeof(float) - 1]));
}

TEST(Pool, StaleReadIsUndetectedWithoutPoison) {  // negative control
  Fixture f;
  Buffer buffer = f.get(kMiB);
  auto* stale = static_cast<volatile float*>(buffer.data());
  stale[0] = 1.0F;
  buffer.reset();
  EXPECT_EQ(stale[0], 1.0F);
}

TEST(Pool, BuffersOutlivePool) {
  auto memory_tracker = std::make_shared<MemoryTracker>();
  auto pool = std::make_unique<MemoryPool>(memory_tracker);
  Buffer large = pool->allocate(kMiB, MemoryCategory::other);
  Buffer small = pool->allocate(100, MemoryCategory::other);
  pool.reset();
  std::memset(large.data(), 1, kMiB);
  large.reset();
  small.reset();
  EXPECT_EQ(memory_tracker->snapshot().total_now, 0U);
}

TEST(Pool, ImpossibleRequestFailsAndTracksNothing) {
  Fixture f;
  EXPECT_THROW(f.get(std::numeric_limits<std::size_t>::max() / 2), SystemError);
  EXPECT_THROW(f.get(std::numeric_limits<std::size_t>::max()), SystemError);
  EXPECT_EQ(f.memory_tracker->snapshot().total_peak, 0U);
  EXPECT_TRUE(f.get(kMiB));
}

TEST(Pool, ServesManyThreads) {
  Fixture f;
  std::vector<std::jthread> threads;
  for (int t = 1; t <= 4; ++t)
    threads.emplace_back([&f, t] {
      for (std::size_t i = 0; i < 300; ++i) {
        Buffer buffer = f.get((1 + (i * static_cast<std::size_t>(t)) % 5) * 300'000);
        auto* bytes = static_cast<unsigned char*>(buffer.data());
        bytes[0] = bytes[buffer.bytes() - 1] = static_cast<unsigned char>(t);
        std::this_thread::yield();
        ASSERT_EQ(bytes[0], t);
        ASSERT_EQ(bytes[buffer.bytes() - 1], t);
      }
    });
  threads.clear();
  EXPECT_EQ(f.memory_tracker->snapshot().total_now, 0U);
}

/// Requests of two sizes such that idle blocks of the first never serve the second.
struct LimitedFixture {
  std::shared_ptr<test::LimitedDevice> device = std::make_shared<test::LimitedDevice>(100 * kMiB);
  std::shared_ptr<MemoryTracker> memory_tracker = std::make_shared<MemoryTracker>();
  MemoryPool pool{memory_tracker, {}, device};
  Buffer get(std::size_t bytes, MemoryCategory use = MemoryCategory::activation) { return pool.allocate(bytes, use); }
};

TEST(Pool, IdleMemoryIsReturnedBeforeMemoryIsExhausted) {
  LimitedFixture f;
  {
    std::vector<Buffer> live;
    for (int i = 0; i < 8; ++i) live.push_back(f.get(10 * kMiB));
  }
  EXPECT_EQ(f.device->used, 80 * kMiB) << "the pool keeps idle memory of a device";
  const Buffer large = f.get(60 * kMiB);
  EXPECT_TRUE(large);
  EXPECT_EQ(f.device->used, 60 * kMiB);
}

TEST(Pool, SmallRequestsFindTheIdleMemoryToo) {
  LimitedFixture f;
  {
    std::vector<Buffer> live;
    for (int i = 0; i < 10; ++i) live.push_back(f.get(10 * kMiB));
  }
  EXPECT_EQ(f.device->used, 100 * kMiB);
  EXPECT_TRUE(f.get(1024));
}

TEST(Pool, ExhaustedMemoryNamesWhatHoldsIt) {
  LimitedFixture f;
  const Buffer parameters = f.get(60 * kMiB, MemoryCategory::parameter);
  const Buffer gradients = f.get(30 * kMiB, MemoryCategory::gradient);
  f.get(8 * kMiB).reset();  // idle
  try {
    f.get(20 * kMiB);
    FAIL() << "more than the device has";
  } catch (const SystemError& error) {
    EXPECT_STREQ(error.what(),
                 "limited: can't allocate 20971520 bytes: out of memory; this rank holds 94.4 MB: parameter 62.9 MB, "
                 "gradient 31.5 MB");
  }
  EXPECT_EQ(f.device->used, 90 * kMiB);
  EXPECT_TRUE(f.get(9 * kMiB)) << "the pool can still be used";
}

/// Queued work may use a block that is idle for the host.
TEST(Pool, WaitsForTheDeviceBeforeItReturnsMemory) {
  auto f = std::make_unique<LimitedFixture>();
  const std::shared_ptr<test::LimitedDevice> device = f->device;
  const auto use = [&](std::size_t count) {
    std::vector<Buffer> live;
    for (std::size_t i = 0; i < count; ++i) live.push_back(f->get(10 * kMiB));
  };
  use(8);
  EXPECT_TRUE(f->get(60 * kMiB)) << "after idle blocks";
  EXPECT_LT(device->used, 80 * kMiB);
  f->pool.trim();
  EXPECT_EQ(device->used, 0U);
  use(2);
  EXPECT_EQ(device->used, 20 * kMiB);
  f.reset();
  EXPECT_EQ(device->used, 0U);
  EXPECT_TRUE(device->synchronized_before_frees);
  // The control: a free of the program's own.
  device->free(device->allocate(64), 64);
  EXPECT_FALSE(device->synchronized_before_frees);
}

TEST(Pool, NoStreamWaitsForTheHostWhenAPoolEnds) {
  const auto device = std::make_shared<test::LimitedDevice>(100 * kMiB);
  auto pool = std::make_unique<MemoryPool>(std::make_shared<MemoryTracker>(), MemoryPoolOptions{}, device);
  pool->allocate(kMiB, MemoryCategory::activation).reset();
  const int before = device->host_waits;
  pool.reset();
  EXPECT_EQ(device->used, 0U);
  EXPECT_EQ(device->host_waits, before + 1);
}

TEST(Pool, NoStreamWaitsForTheHostWhenADeviceAllocatesOrFrees) {
  LimitedFixture f;
  {
    std::vector<Buffer> live;
    for (std::size_t i = 1; i < 6; ++i) live.push_back(f.get(i * 3 * kMiB));
    live.push_back(f.get(1024));
  }
  EXPECT_TRUE(f.device->waited_before_calls);
  const int before = f.device->host_waits;
  f.get(3 * kMiB).reset();
  f.get(1024).reset();
  EXPECT_EQ(f.device->host_waits, before) << "reused memory needs no call of the device";
  f.pool.trim();
  EXPECT_GT(f.device->host_waits, before);
}

}  // namespace
}  // namespace tessera::base
