// Which stores are used, by the times that blocks take.
#include "backends/shm/operation.h"

#include <gtest/gtest.h>

namespace tessera::comm::shm {
namespace {

using Target = StoreChoice::Target;

constexpr std::size_t kOperation = std::size_t{1} << 20;

/// How many of 256 blocks are written with streaming stores, where the two kinds take these times, in ns a byte.
int streamed(StoreChoice& choice, Target target, float plain, float streaming, std::size_t operation = kOperation) {
  int count = 0;
  for (int i = 0; i < 256; ++i) {
    const bool streams = choice.next(target, operation);
    choice.add(target, operation, streams, streams ? streaming : plain);
    if (streams) ++count;
  }
  return count;
}

TEST(ShmStoreChoice, UsesStreamingStoresWherePlainOnesAreSlow) {
  for (const Target target : {Target::tile, Target::copy, Target::reduced_result, Target::copied_result}) {
    StoreChoice choice(true);
    EXPECT_EQ(streamed(choice, target, 0.45F, 0.04F), 250) << "three, and three of the 250 that follow, are plain";
  }
}

TEST(ShmStoreChoice, NoticesCoresThatMove) {
  StoreChoice choice(true);
  EXPECT_EQ(streamed(choice, Target::copy, 0.02F, 0.04F), 6) << "only tried";
  const int apart = streamed(choice, Target::copy, 0.45F, 0.04F);
  EXPECT_GT(apart, 240) << "at once: plain stores are what is timed";
  const int together = streamed(choice, Target::copy, 0.02F, 0.04F);
  EXPECT_LT(together, 140) << "after two of the tries, which are 64 blocks apart";
  EXPECT_LT(streamed(choice, Target::copy, 0.02F, 0.04F), 6);
}

TEST(ShmStoreChoice, AGainOfTwoIsWorthItForTilesOnly) {
  StoreChoice choice(true);
  EXPECT_EQ(streamed(choice, Target::tile, 0.07F, 0.035F), 250);
  EXPECT_EQ(streamed(choice, Target::copy, 0.07F, 0.035F), 6);
  EXPECT_EQ(streamed(choice, Target::reduced_result, 0.07F, 0.035F), 6);
  StoreChoice shared(false);
  EXPECT_EQ(streamed(shared, Target::tile, 0.07F, 0.035F), 6) << "the reader shares the core and its caches";
  EXPECT_GT(streamed(shared, Target::tile, 0.45F, 0.04F), 240);
}

TEST(ShmStoreChoice, SingleSlowBlocksChangeNothing) {
  StoreChoice choice(true);
  EXPECT_EQ(streamed(choice, Target::copy, 0.02F, 0.04F), 6);
  choice.add(Target::copy, kOperation, false, 100);  // its rank lost the core
  EXPECT_FALSE(choice.next(Target::copy, kOperation));
  choice.add(Target::copy, kOperation, false, 100);
  EXPECT_TRUE(choice.next(Target::copy, kOperation)) << "two of the last three";
}

TEST(ShmStoreChoice, SizesAreTimedApart) {
  StoreChoice choice(true);
  EXPECT_EQ(streamed(choice, Target::copy, 0.45F, 0.04F, kOperation), 250);
  EXPECT_EQ(streamed(choice, Target::copy, 0.02F, 0.04F, 8 * kOperation), 6);
  EXPECT_GT(streamed(choice, Target::copy, 0.45F, 0.04F, kOperation), 250) << "unchanged";
}

TEST(ShmStoreChoice, SmallBlocksAreWrittenPlainlyAndNotTimed) {
  StoreChoice choice(true);
  int blocks = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{8} << 10})
    for (int i = 0; i < 10; ++i)
      choice.write(Target::tile, kOperation, bytes, [&](bool streams) {
        EXPECT_FALSE(streams);
        ++blocks;
      });
  EXPECT_EQ(blocks, 20);
  for (int i = 0; i < 6; ++i)
    choice.write(Target::tile, kOperation, std::size_t{64} << 10, [&](bool streams) { EXPECT_EQ(streams, i >= 3); });
}

}  // namespace
}  // namespace tessera::comm::shm
