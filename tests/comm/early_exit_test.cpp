// A rank that is done with a communicator while others are not.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

/// A send completes before the message has been received: it remains, although the sender closes the communicator and
/// creates others.
TEST(EarlyExit, OfSenderLosesNoData) {
  constexpr std::size_t kCount = 30'000;  // not more than the tiles of a message hold
  std::atomic<bool> gone{false};
  run_ranks(3, [&](Communicator& world) {
    const auto pair = world.split(world.rank() == 1 ? -1 : 0, 0);
    auto all = world.split(0, world.rank());
    std::vector<float> x(kCount, world.rank() == 0 ? 7.0f : 0.0f);
    if (world.rank() == 1)
      while (!gone.load()) std::this_thread::yield();
    if (world.rank() == 0) all->send(view_of(x.data(), kCount), 1).wait();
    if (world.rank() == 1) {
      all->recv(view_of(x.data(), kCount), 0).wait();
      EXPECT_EQ(x, std::vector<float>(kCount, 7.0f));
    }
    all.reset();
    if (pair == nullptr) return;
    std::vector<std::unique_ptr<Communicator>> others;  // enough to need every free piece of memory
    std::fill(x.begin(), x.end(), 1.0f);
    for (int i = 0; i < 10; ++i) {
      others.push_back(pair->split(0, pair->rank()));
      others.back()->all_reduce(view_of(x.data(), kCount), view_of(x.data(), kCount), ReduceOp::max()).wait();
    }
    if (world.rank() == 0) gone.store(true);
  });
}

}  // namespace
}  // namespace tessera::comm_test
