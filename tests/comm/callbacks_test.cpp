// Callbacks and detached works behind communicators that wrap another one.
#include <gmock/gmock.h>
#include <unistd.h>

#include <barrier>
#include <filesystem>
#include <semaphore>

#include "tessera/comm/slow_link/slow_link.h"
#include "tests/comm/decorators_support.h"
#include "tests/conformance/cases.h"

namespace tessera::comm_test {
namespace {

std::string one_of(std::vector<std::string> errors) {
  for (std::string& error : errors)
    if (!error.empty()) return std::move(error);
  return "";
}

void expect_conforming(const InitOptions& config) {
  std::vector<conformance::Behaviour> all = conformance::callback_behaviours();
  for (const conformance::Behaviour& behaviour : conformance::window_behaviours()) all.push_back(behaviour);
  for (const conformance::Behaviour& behaviour : all) {
    std::vector<std::string> errors(3);
    run_threads(3, config,
                [&](Communicator& comm) { errors[static_cast<std::size_t>(comm.rank())] = behaviour.run(comm); });
    EXPECT_EQ(one_of(errors), "") << behaviour.name;
  }
}

TEST(Callbacks, ConformOverSlowLinks) {
  InitOptions config = quick_config();
  config.decorate = [](std::unique_ptr<Communicator> world) {
    return slow_links(std::move(world), {.link = {100us, 1e9}, .intra = {}, .hosts = 1});
  };
  expect_conforming(config);
}

TEST(Callbacks, ConformBesideFlightRecorder) {
  const std::string directory = std::filesystem::temp_directory_path() / ("callbacks-" + std::to_string(::getpid()));
  InitOptions config = quick_config();
  config.flight_recorder = directory;
  expect_conforming(config);
  std::filesystem::remove_all(directory);
}

TEST(Callbacks, ReportDroppedCall) {
  std::barrier<> meeting(2);
  run_threads(2, with_fault({.kind = FaultKind::drop, .call = 1, .rank = 0}), [&](Communicator& comm) {
    std::string error;
    std::binary_semaphore ended(0);
    float x = 1;
    Work work = comm.all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum(), {.timeout = 300ms});
    work.on_done([&](const std::exception_ptr& failure) {
      error = error_of([&] {
        if (failure != nullptr) std::rethrow_exception(failure);
      });
      ended.release();
    });
    work.detach();
    ASSERT_TRUE(ended.try_acquire_for(30s));
    EXPECT_THAT(error, testing::StartsWith("Timeout: "));
    meeting.arrive_and_wait();
  });
}

}  // namespace
}  // namespace tessera::comm_test
