#include "backends/shm/arena.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace tessera::comm::shm {
namespace {

constexpr auto kUse = base::MemoryCategory::communication;

bool holds(const base::Buffer& block, std::byte value) {
  return std::all_of(block.bytes_at(0), block.bytes_at(0) + block.bytes(), [&](std::byte each) { return each == value; });
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
  const base::Buffer large = arena->allocate(std::size_t{64} << 20, kUse, nullptr, true);  // fresh pages: idle ones are returned before
  EXPECT_TRUE(holds(large, std::byte{0}));
  for (std::size_t i = 0; i < live.size(); ++i) ASSERT_TRUE(holds(live[i], value(2 * i))) << i;
  const base::Buffer again = arena->allocate(std::size_t{100} << 10, kUse, nullptr, true);
  EXPECT_TRUE(holds(again, std::byte{0}));
}

TEST(ShmArena, ReturnedPagesHoldNoLiveBlocks) { live_blocks_survive(true); }
TEST(ShmArena, ReturnedPagesOfPlainMemoryHoldNoLiveBlocks) { live_blocks_survive(false); }

TEST(ShmArena, CapacityIsTwiceTheMemory) {
  const auto arena = Arena::make_windows(true, 0);
  const auto memory = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_GE(arena->mapping()->bytes(), memory);
}

}  // namespace
}  // namespace tessera::comm::shm
