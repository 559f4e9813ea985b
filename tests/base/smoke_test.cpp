#include <gtest/gtest.h>
#include "tessera/base/memory.h"
#include "tessera/base/stream.h"
TEST(Memory, PoolReuses) {
  auto ledger = std::make_shared<tessera::base::Ledger>();
  tessera::base::MemoryPool pool(ledger);
  auto a = pool.allocate(1 << 20, tessera::base::MemoryUse::activation);
  void* p = a.data();
  a.reset();
  auto b = pool.allocate(1 << 20, tessera::base::MemoryUse::activation);
  EXPECT_EQ(p, b.data());
}
