// A rank's world: its cores, and its end.
#include "backends/shm/runtime.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "tessera/comm/bootstrap/thread_bootstrap.h"

namespace tessera::shm_test {
namespace {

using namespace std::chrono_literals;

/// Keeps the thread that polls it in the poll until it is opened.
struct Gate final : comm::Pollable {
  bool poll(bool) noexcept override {
    reached = true;
    reached.notify_all();
    open.wait(false);
    return false;  // the thread polls once more before it sleeps
  }
  std::atomic<bool> reached{false};
  std::atomic<bool> open{false};
};

cpu_set_t cores(std::initializer_list<int> numbers) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int number : numbers) CPU_SET(number, &set);
  return set;
}

TEST(ShmRuntime, RanksThatAreBoundToCoresHaveOne) {
  using comm::shm::ShmRuntime;
  EXPECT_TRUE(ShmRuntime::enough_cores(std::vector{cores({0, 1}), cores({0, 1})}, 2)) << "not bound";
  EXPECT_TRUE(ShmRuntime::enough_cores(std::vector{cores({4}), cores({9})}, 2));
  EXPECT_FALSE(ShmRuntime::enough_cores(std::vector{cores({4}), cores({4})}, 2)) << "to the same one";
  EXPECT_FALSE(ShmRuntime::enough_cores(std::vector{cores({0, 1})}, 4)) << "threads of one process";
}

/// Where the world only ends its engine, it is polled once more while it has none.
TEST(ShmRuntime, EndsWhileItIsPolled) {
  const auto bootstraps = comm::make_thread_bootstraps(2, 60s);
  const auto end_while_polled = [](const std::shared_ptr<comm::Bootstrap>& bootstrap) {
    Gate gate;
    auto runtime = comm::shm::ShmRuntime::make(bootstrap, {});
    runtime->engine().add(gate);
    runtime->engine().begin_operation();
    runtime->engine().wake_progress_thread();
    gate.reached.wait(false);
    std::thread opens([&] {
      std::this_thread::sleep_for(200ms);  // until the world is ending
      gate.open = true;
      gate.open.notify_all();
    });
    runtime.reset();
    EXPECT_TRUE(gate.open) << "the world ended below a poll";
    opens.join();
  };
  std::thread other(end_while_polled, bootstraps[1]);
  end_while_polled(bootstraps[0]);
  other.join();
}

}  // namespace
}  // namespace tessera::shm_test
