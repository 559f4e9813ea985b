// The engine on a device whose memory the host can't access: alone, and with ranks whose communicators stage it.
#include <gtest/gtest.h>

#include <atomic>
#include <latch>

#include "tessera/comm/staging.h"
#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using harness::TrainingRecord;
using harness::TrainingSpec;

TrainingRecord train_on(const std::string& strategy, int ranks, std::shared_ptr<base::DeviceRuntime> runtime,
                        bool ipc) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 4;
  spec.engine = harness::engine_for(strategy);
  spec.engine.clip_norm = 0.5;
  spec.engine.poison = true;
  spec.runtime = std::move(runtime);
  spec.device_ipc = ipc;
  spec.drains = true;  // the norms of all steps
  return harness::train(spec);
}

/// Device memory moves by host staging or by IPC.
struct Case {
  const char* strategy;
  int ranks;
  bool ipc;
};

class EngineDevices : public testing::TestWithParam<Case> {};

TEST_P(EngineDevices, HostAccessesNoDeviceMemory) {
  const auto& [strategy, ranks, ipc] = GetParam();
  const auto device = harness::make_guarded_device({.lazy = ranks > 1});
  const TrainingRecord guarded = train_on(strategy, ranks, device, ipc);
  const TrainingRecord host = train_on(strategy, ranks, nullptr, false);
  EXPECT_EQ(guarded.losses, host.losses);
  EXPECT_EQ(guarded.norms, host.norms);
  EXPECT_EQ(guarded.parameters, host.parameters);
  EXPECT_EQ(guarded.model_state, host.model_state);
  EXPECT_FALSE(guarded.parameters.empty());
  for (std::size_t r = 0; r < host.later_by_rank.size(); ++r) {
    EXPECT_EQ(guarded.later_by_rank[r].all_gather, host.later_by_rank[r].all_gather);
    EXPECT_EQ(guarded.later_by_rank[r].reduce_scatter, host.later_by_rank[r].reduce_scatter);
    EXPECT_EQ(guarded.later_by_rank[r].all_reduce, host.later_by_rank[r].all_reduce);
  }
  const harness::GuardedSharing sharing = harness::sharing_of(*device);
  EXPECT_EQ(sharing.imports > 0, ipc);
  EXPECT_EQ(sharing.exported + sharing.imported + sharing.freed_too_early, 0);
}

INSTANTIATE_TEST_SUITE_P(Strategies, EngineDevices,
                         testing::Values(Case{"ddp", 1, false}, Case{"zero1", 1, false}, Case{"zero2", 1, false},
                                         Case{"fsdp", 1, false}, Case{"ddp", 2, false}, Case{"zero1", 2, false},
                                         Case{"zero2", 2, false}, Case{"fsdp", 2, false}, Case{"ddp", 2, true},
                                         Case{"zero1", 2, true}, Case{"zero2", 2, true}, Case{"fsdp", 2, true},
                                         Case{"fsdp", 4, true}, Case{"hsdp", 4, true}),
                         [](const auto& given) {
                           return std::string(given.param.strategy) + "_" + std::to_string(given.param.ranks) +
                                  (given.param.ipc ? "_ipc" : "");
                         });

/// The last exchange of an engine may end with it.
TEST(HostCollectives, MemoryOutlivesACollectiveInFlight) {
  const auto device = harness::make_guarded_device({.lazy = true});
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(1, config, [&](comm::Communicator& world) {
    auto host = std::make_unique<comm::HostCollectives>(world, *device);
    std::int32_t in = 1, out = 0;
    bool ran = false;
    std::uint64_t freed_by_then = 0;
    const auto exchange = [&](comm::ConstView, comm::View, comm::OpOptions options) {
      options.after->run([&] {
        ran = true;
        freed_by_then = harness::host_waits().memory;
      });
      return comm::Work();
    };
    host->begin_through_device({&in, 1, base::DType::i32, {}}, {&out, 1, base::DType::i32, {}}, exchange);
    const std::uint64_t allocated = harness::host_waits().memory;
    EXPECT_FALSE(ran) << "the control";
    host.reset();
    EXPECT_TRUE(ran);
    EXPECT_EQ(freed_by_then, allocated) << "the memory was freed before the work ran";
    EXPECT_GT(harness::host_waits().memory, allocated);
  });
}

// --- exceptions

struct LeftByException {};

/// `body` throws LeftByException on rank 0 while its engine lives; `after` runs when the engine is gone.
void leave(int ranks, const std::function<void(nn::CausalModel&, comm::Communicator&)>& body,
           const std::function<void(comm::Communicator&)>& after) {
  const auto device = harness::make_guarded_device({.lazy = true});
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(100);
  config.decorate = [&](auto world) { return comm::stage(std::move(world), device, {}); };
  comm::run_threads(ranks, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .runtime = device});
    const auto model = nn::make_model(context, nn::preset("gpt-nano"));
    try {
      Engine engine(*model, world, harness::engine_for("fsdp"));
      engine.initialize(0);
      context.stream().synchronize();
      world.barrier().wait();
      body(*model, world);
    } catch (const LeftByException&) {
    }
    after(world);
  });
}

/// The engine's memory goes back to an allocator that does not wait for the device.
TEST(EngineLeftByException, DeviceHasDoneItsWork) {
  std::atomic<bool> done{false};
  leave(
      1,
      [&](nn::CausalModel& model, comm::Communicator&) {
        model.context().stream().run([&] { done = true; });
        EXPECT_FALSE(done) << "the control";
        throw LeftByException();
      },
      [&](comm::Communicator&) { EXPECT_TRUE(done); });
}

/// The other rank never calls what this one's device waits for, and the operation's deadline is far away.
TEST(EngineLeftByException, WaitsForNoOtherRank) {
  std::atomic<bool> done{false};
  std::latch gone(2);
  std::chrono::steady_clock::time_point start;
  leave(
      2,
      [&](nn::CausalModel& model, comm::Communicator& world) {
        if (world.rank() == 1) return gone.arrive_and_wait();
        start = std::chrono::steady_clock::now();
        const auto batch = harness::make_batch(model.context(), {}, 0, 0);
        model.loss(batch.tokens, batch.targets);
        model.context().stream().run([&] { done = true; });
        throw LeftByException();
      },
      [&](comm::Communicator& world) {
        if (world.rank() == 1) return;
        EXPECT_TRUE(done);
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
        gone.count_down();
      });
}

// --- host waits

/// Host waits per step on lazy streams, from the batch to the update; the first steps fill the pools.
std::vector<harness::HostWaits> waits_of(TrainingSpec spec) {
  spec.steps = 4;
  spec.global_batch = 4;
  spec.engine.clip_norm = 0.5;
  spec.runtime = harness::make_guarded_device({.lazy = true});
  std::vector<harness::HostWaits> later;
  for (const auto& steps : harness::train(spec).waits) later.insert(later.end(), steps.begin() + 2, steps.end());
  return later;
}

class HostWaiting : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(HostWaiting, StepNeverMakesHostWait) {
  const auto& [strategy, ranks] = GetParam();
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.engine = harness::engine_for(strategy);
  const std::vector<harness::HostWaits> waits = waits_of(spec);
  EXPECT_EQ(waits.size(), static_cast<std::size_t>(2 * ranks));
  for (const harness::HostWaits& step : waits) {
    EXPECT_EQ(step.events, 0U);
    EXPECT_EQ(step.copies, 0U);
    EXPECT_EQ(step.memory, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, HostWaiting,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "fsdp", "hsdp", "shard_grad_op"),
                                          testing::Values(1, 2)),
                         [](const auto& given) {
                           return std::string(std::get<0>(given.param)) + "_" +
                                  std::to_string(std::get<1>(given.param));
                         });

/// Negative control: one wait in each step, by each rank.
TEST(HostWaits, DetectsDeliberateWait) {
  TrainingSpec spec;
  spec.after_backward = [](int, int, Engine&, nn::CausalModel&) {};  // makes the harness wait for the backward
  for (const harness::HostWaits& step : waits_of(spec)) EXPECT_EQ(step, (harness::HostWaits{.events = 1}));
}

TEST(HostWaits, CountEventsUnpinnedCopiesAndAllocations) {
  const auto device = harness::make_guarded_device({.lazy = true});
  const auto stream = device->make_stream();
  const auto counted = [&](const std::function<void()>& work) {
    const harness::HostWaits before = harness::host_waits();
    work();
    return harness::host_waits() - before;
  };
  void *at = nullptr, *pinned = nullptr;
  const harness::HostWaits one_block{.memory = 1};
  EXPECT_EQ(counted([&] { at = device->allocate(64); }), one_block);
  EXPECT_EQ(counted([&] { pinned = device->allocate_host(64); }), one_block);
  char ordinary[64] = {};
  const auto upload = [&](const void* from, std::size_t bytes) {
    return counted([&] { device->copy(*stream, base::CopyDirection::host_to_device, at, from, bytes); });
  };
  EXPECT_EQ(upload(pinned, 64), harness::HostWaits{});
  EXPECT_EQ(upload(ordinary, 64), (harness::HostWaits{.copies = 1}));
  device->pin_host(ordinary, 32);
  EXPECT_EQ(upload(ordinary + 16, 16), harness::HostWaits{});
  EXPECT_EQ(upload(ordinary + 16, 17), (harness::HostWaits{.copies = 1})) << "one byte is not pinned";
  device->unpin_host(ordinary, 32);
  EXPECT_EQ(upload(ordinary + 16, 16), (harness::HostWaits{.copies = 1}));
  const harness::HostWaits one_wait{.events = 1};
  EXPECT_EQ(counted([&] { stream->wait(stream->record()); }), harness::HostWaits{}) << "the stream waits";
  EXPECT_EQ(counted([&] { stream->synchronize(); }), one_wait);
  EXPECT_EQ(counted([&] { device->synchronize(); }), one_wait);
  EXPECT_EQ(counted([&] { device->free_host(pinned, 64); }), one_block);
  EXPECT_EQ(counted([&] { device->free(at, 64); }), one_block);
}

}  // namespace
}  // namespace tessera::fsdp
