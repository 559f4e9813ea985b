// Windows whose ranks fail, leave or wait for what doesn't come. What they do otherwise is in tests/conformance.
#include "tessera/comm/window.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class WindowOver : public testing::TestWithParam<const char*> {
 protected:
  void run(int ranks, const std::function<void(Communicator&)>& body) {
    InitOptions config;
    config.backend = GetParam();
    config.timeout = 5s;
    run_threads(ranks, config, body);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, WindowOver, testing::Values("shm", "tcp"),
                         [](const auto& backend) { return std::string(backend.param); });

template <class F>
std::string error_of(F&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST_P(WindowOver, RankThatLeavesEndsTheWaitsOfOthersAndNotTheirWorld) {
  run(3, [](Communicator& world) {
    std::vector<float> memory(8);
    const auto begin = std::chrono::steady_clock::now();
    const std::string said = error_of([&] {
      Window window(world, view_of(memory.data(), memory.size()));
      if (world.rank() == 1) throw std::runtime_error("rank 1 leaves");
      window.wait_signal(1);
    });
    EXPECT_THAT(said, world.rank() == 1 ? HasSubstr("rank 1 leaves") : HasSubstr("left a window without closing it"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 4s) << "the others waited until their deadline";
    world.barrier().wait();
  });
}

TEST_P(WindowOver, LateSignalNamesItsRankAndLeavesTheWindowUsable) {
  run(2, [](Communicator& world) {
    std::vector<float> memory(8);
    const auto channel = world.split(0, world.rank());
    std::string said;
    {
      Window window(world, view_of(memory.data(), memory.size()));
      if (world.rank() == 0) said = error_of([&] { window.wait_signal(1, 1, {.timeout = 50ms, .label = "halo"}); });
      channel->barrier().wait();
      if (world.rank() == 1) window.signal(0).wait();
      if (world.rank() == 0) window.wait_signal(1);
    }
    if (world.rank() == 0) {
      EXPECT_THAT(said, HasSubstr("0 of 1 signals of rank 1 have come within 50ms (halo)"));
    }
    world.barrier().wait();
  });
}

TEST_P(WindowOver, CloseNamesTheRankThatDoesNot) {
  InitOptions config;
  config.backend = GetParam();
  config.timeout = 300ms;
  run_threads(2, config, [](Communicator& world) {
    std::vector<float> memory(8);
    std::string said;
    {
      Window window(world, view_of(memory.data(), memory.size()));
      if (world.rank() == 0) said = error_of([&] { window.close(); });
      if (world.rank() == 1) std::this_thread::sleep_for(600ms);
    }
    if (world.rank() == 0) {
      EXPECT_THAT(said, HasSubstr("rank 1 has not closed it within 300ms"));
    }
  });
}

TEST_P(WindowOver, SignalCountsOnlyWhatWasPutBefore) {
  run(2, [](Communicator& world) {
    constexpr std::size_t kCount = 1 << 20;
    std::vector<float> memory(2 * kCount, 0), data(kCount, 1);
    Window window(world, view_of(memory.data(), memory.size()));
    if (world.rank() == 0) {
      Work first = window.put(view_of(data.data(), kCount), 1, 0);
      window.signal(1).wait();
      Work second = window.put(view_of(data.data(), kCount), 1, kCount * sizeof(float));
      first.wait();
      second.wait();
    } else {
      window.wait_signal(0);
      EXPECT_EQ(memory[kCount - 1], 1);
    }
    window.close();
    if (world.rank() == 1) {
      EXPECT_EQ(memory[2 * kCount - 1], 1) << "close() waits for what was put";
    }
    EXPECT_GT(window.traffic().bytes_sent(), world.rank() == 0 ? 8 * kCount : 0);
  });
}

TEST_P(WindowOver, RankOfItsOwnNeedsNoMessage) {
  run(1, [](Communicator& world) {
    std::vector<int> memory(4);
    Window window(world, view_of(memory.data(), memory.size()));
    const int value = 7;
    window.put(view_of(&value, 1), 0, 8).wait();
    window.signal(0).wait();
    window.wait_signal(0);
    int got = 0;
    window.get(view_of(&got, 1), 0, 8).wait();
    EXPECT_EQ(got, 7);
    EXPECT_EQ(window.traffic().bytes_sent(), 0U);
  });
}

}  // namespace
}  // namespace tessera::comm
