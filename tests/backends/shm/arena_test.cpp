#include "backends/shm/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace tessera::comm::shm {
namespace {

constexpr auto kUse = base::MemoryCategory::communication;

bool holds(const base::Buffer& block, std::byte value) {
  return std::all_of(block.bytes_at(0), block.bytes_at(0) + block.bytes(),
                     [&](std::byte each) { return each == value; });
}

// Sizes are not multiples of the pages of all systems, so most blocks share some with their neighbors.
void live_blocks_survive(bool shared) {
  const auto arena = Arena::make_windows(shared, 1);
  std::vector<base::Buffer> live, gone;
  const auto value = [](std::size_t i) { return static_cast<std::byte>(1 + i % 250); };
  for (std::size_t i = 0; i < 400; ++i) {
    base::Buffer block = arena->allocate((64 + 4 * (i % 25)) * 1024, kUse, nullptr, false);
    std::fill(block.bytes_at(0), block.bytes_at(0) + block.bytes(), value(i));
    (i % 2 == 0 ? live : gone).push_back(std::move(block));
  }
  gone.clear();
  const base::Buffer large =
      arena->allocate(std::size_t{64} << 20, kUse, nullptr, true);  // fresh pages: idle ones are returned before
  EXPECT_TRUE(holds(large, std::byte{0}));
  for (std::size_t i = 0; i < live.size(); ++i) ASSERT_TRUE(holds(live[i], value(2 * i))) << i;
  const base::Buffer again = arena->allocate(std::size_t{100} << 10, kUse, nullptr, true);
  EXPECT_TRUE(holds(again, std::byte{0}));
}

TEST(ShmArena, ReturnedPagesHoldNoLiveBlocks) { live_blocks_survive(true); }
TEST(ShmArena, ReturnedPagesOfPlainMemoryHoldNoLiveBlocks) { live_blocks_survive(false); }

TEST(ShmArena, CapacityIsTwiceTheMemory) {
  const auto arena = Arena::make_windows(true, 0);
  const auto memory =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_GE(arena->mapping()->bytes(), memory);
}

/// Each rank maps the windows of all into the 2^47 bytes of addresses that it has.
TEST(ShmArena, WindowsOfManyRanksFitIntoAddresses) {
  constexpr int kRanks = 1 << 14;
  const auto arena = Arena::make_windows(true, 0, kRanks);
  EXPECT_LE(arena->mapping()->bytes(), (std::size_t{1} << 45) / kRanks);
  EXPECT_GE(arena->mapping()->bytes(), std::size_t{1} << 30);
}

/// One after the other, each has its color; so does one where the next place is taken.
TEST(ShmArena, SegmentsHaveTheirColors) {
  const UniqueFd fd = make_segment("test", std::size_t{3} << 20);
  std::vector<std::shared_ptr<Mapping>> mapped;
  std::vector<void*> taken;
  for (int i = 0; i < 200; ++i) {
    const int color = i * 37;
    mapped.push_back(map_segment(fd.get(), i % 2 == 0, color));
    const auto at = reinterpret_cast<std::uintptr_t>(mapped.back()->data());
    EXPECT_EQ(at % (kColors * kColorStep), static_cast<std::size_t>(color) % kColors * kColorStep) << i;
    if (i % 10 != 9) continue;
    // Below it, so that the next segment doesn't fit there.
    void* const below = reinterpret_cast<void*>(at - 2 * kColors * kColorStep);
    void* const there = ::mmap(below, 2 * kColors * kColorStep, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (there != MAP_FAILED) taken.push_back(there);  // else something is there already
  }
  for (const auto& one : mapped) EXPECT_EQ(one->bytes(), std::size_t{3} << 20);
  mapped.front()->data()[7] = std::byte{42};
  EXPECT_EQ(mapped.back()->data()[7], std::byte{42});
  for (void* const one : taken) ::munmap(one, 2 * kColors * kColorStep);
}

/// A rank maps the arenas of all, and has other needs.
TEST(ShmArena, LimitOnAddressesLeavesRoomForAllRanks) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  for (const int ranks : {2, 8}) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const std::size_t room = std::size_t{8} << 30;
    rlimit limit = before;
    limit.rlim_cur = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + room;
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
    const auto windows = Arena::make_windows(true, 0, ranks), staging = Arena::make_staging(true, 1, ranks);
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    const std::size_t all =
        static_cast<std::size_t>(ranks) * (windows->mapping()->bytes() + staging->mapping()->bytes());
    EXPECT_LE(all, room / 2) << ranks;
    EXPECT_GE(all, room / 4) << ranks;
    EXPECT_GT(windows->allocate(std::size_t{16} << 20, kUse, nullptr).bytes(), 0U);
  }
  const auto memory =
      static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_GE(Arena::make_windows(true, 0, 8)->mapping()->bytes(), memory);  // the control: no limit
}

}  // namespace
}  // namespace tessera::comm::shm
