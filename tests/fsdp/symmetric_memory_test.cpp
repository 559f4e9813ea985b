// The engine's gathers and reductions use symmetric memory of the communicator on which they run, and the same of it on
// all ranks, whatever the ranks' timing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <thread>

#include "tessera/comm/flight_recorder.h"
#include "tessera/comm/staging.h"
#include "tests/harness/device_only.h"
#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using Calls = std::vector<std::string>;

struct SymmetricCase {
  const char* strategy;
  const char* mesh = "";
  int ranks = 2;
  bool offload = false;
  std::string flights = {};  ///< folder of the flight recorder; "": none
};

/// The calls of each rank in `steps` steps.
std::vector<Calls> calls_of(const SymmetricCase& given, int steps = 3) {
  const auto device = harness::make_guarded_device({.lazy = true});
  std::vector<std::shared_ptr<harness::SymmetricLog>> logs;
  for (int rank = 0; rank < given.ranks; ++rank) logs.push_back(std::make_shared<harness::SymmetricLog>());
  comm::InitOptions config;
  config.backend = "shm";
  config.decorate = [&](auto world) {
    const auto rank = static_cast<std::size_t>(world->rank());
    std::unique_ptr<comm::Communicator> logged =
        std::make_unique<harness::DeviceOnly>(comm::stage(std::move(world), device, {}), logs[rank]);
    return given.flights.empty() ? std::move(logged) : comm::record_flight(std::move(logged), given.flights, device);
  };
  harness::TrainingSpec batches;
  batches.ranks = given.ranks;
  batches.global_batch = 4;
  comm::run_threads(given.ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .runtime = device});
    const auto model = nn::make_model(context, nn::preset("gpt-nano"));
    EngineOptions options = harness::engine_for(given.strategy, given.mesh);
    options.cpu_offload = given.offload;
    Engine engine(*model, world, options);
    engine.initialize(0);
    for (int step = 0; step < steps; ++step) {
      if (world.rank() == step % given.ranks) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const harness::TokenBatch batch = harness::make_batch(context, batches, step, world.rank());
      harness::forward_backward(*model, batch);
      engine.step(1e-3);
    }
  });
  std::vector<Calls> calls;
  for (const auto& log : logs) calls.push_back(log->calls());
  return calls;
}

/// The numbers of calls of one kind: all, those between blocks, and those with other memory only.
struct Counted {
  int all = 0, symmetric = 0, other = 0;
};
Counted count(const Calls& calls, const std::string& kind) {
  Counted counted;
  for (const std::string& call : calls) {
    if (call.substr(0, call.find(' ')) != kind) continue;
    ++counted.all;
    if (std::count(call.begin(), call.end(), '#') == 2) ++counted.symmetric;
    if (call.find('#') == std::string::npos) ++counted.other;
  }
  return counted;
}

class SymmetricMemory : public testing::TestWithParam<SymmetricCase> {};

TEST_P(SymmetricMemory, IsThatOfAllRanks) {
  const std::vector<Calls> calls = calls_of(GetParam());
  for (const Calls& of_rank : calls) EXPECT_EQ(of_rank, calls.front());
  const Counted gathers = count(calls.front(), "all_gather"), scatters = count(calls.front(), "reduce_scatter"),
                reductions = count(calls.front(), "all_reduce");
  const std::string strategy = GetParam().strategy;
  EXPECT_EQ(gathers.symmetric > 0, strategy != "ddp");
  EXPECT_EQ(gathers.symmetric + gathers.other, gathers.all) << "others compare the execution order";
  EXPECT_EQ(scatters.symmetric > 0, strategy != "ddp");
  EXPECT_EQ(scatters.symmetric, scatters.all);
  EXPECT_EQ(reductions.symmetric > 0, strategy == "ddp");
  EXPECT_EQ(reductions.symmetric + reductions.other, reductions.all) << "others add losses, or over the outer axis";
}

INSTANTIATE_TEST_SUITE_P(Strategies, SymmetricMemory,
                         testing::Values(SymmetricCase{"ddp"}, SymmetricCase{"zero1"}, SymmetricCase{"zero2"},
                                         SymmetricCase{"fsdp"}, SymmetricCase{"shard_grad_op"},
                                         SymmetricCase{"hsdp", "2x2", 4}),
                         [](const auto& given) { return std::string(given.param.strategy); });

/// The control: ranks that gather between other blocks, or to another offset, differ.
TEST(SymmetricMemoryControl, OtherPlacesDiffer) {
  std::array<float, 8> x{}, y{};
  const base::Buffer one(x.data(), sizeof(x), [](void*, std::size_t) {});
  const base::Buffer two(y.data(), sizeof(y), [](void*, std::size_t) {});
  const auto calls = [&](bool swaps, std::size_t offset) {
    harness::SymmetricLog log;
    log.add_block(0, swaps ? two : one);
    log.add_block(0, swaps ? one : two);
    log.add_call(0, {.kind = comm::OpKind::all_gather,
                     .in = {x.data(), 2, base::DType::f32, {}},
                     .out = {y.data() + offset, 4, base::DType::f32, {}}});
    return log.calls();
  };
  EXPECT_EQ(calls(false, 0), Calls{"all_gather #0 to #1+0"});
  EXPECT_NE(calls(false, 0), calls(true, 0));
  EXPECT_NE(calls(false, 0), calls(false, 1));
}

TEST(SymmetricMemory, FlightRecorderPassesItOn) {
  const std::string folder = testing::TempDir() + "symmetric_memory_flights";
  const std::vector<Calls> recorded = calls_of({.strategy = "fsdp", .flights = folder});
  EXPECT_GT(count(recorded[0], "all_gather").symmetric, 0);
  EXPECT_EQ(recorded[0], recorded[1]);
  std::filesystem::remove_all(folder);
}

TEST(SymmetricMemory, StateInHostMemoryIsNone) {
  const std::vector<Calls> calls = calls_of({.strategy = "fsdp", .offload = true});
  EXPECT_EQ(calls[0], calls[1]);
  EXPECT_GT(count(calls[0], "all_gather").all, 0);
}

TEST(SymmetricMemory, OneRankAllocatesNone) {
  EXPECT_EQ(count(calls_of({.strategy = "fsdp", .ranks = 1}).front(), "all_gather").all, 0);
}

}  // namespace
}  // namespace tessera::fsdp
