// Memory of allocate_symmetric(): windows that all ranks make together, or none does.
#include <gmock/gmock.h>

#include <cstdlib>

#include "tests/backends/nccl/fake_cuda.h"
#include "tests/backends/nccl/support.h"
#include "tests/harness/fault.h"

namespace tessera::nccl_test {
namespace {

constexpr std::size_t kCount = std::size_t{1} << 20;  ///< of floats: enough for a window

Buffer symmetric(Communicator& comm, std::size_t count) {
  return comm.allocate_symmetric(count * sizeof(float), MemoryKind::device, {});
}

View view_in(const Buffer& buffer, int device, std::size_t count) {
  return {buffer.data(), count, dtype_of<float>, {DeviceType::cuda, device}};
}

/// Gathers over `comm` from and to these buffers, and checks the result.
void expect_gather(Communicator& comm, const Buffer& in, const Buffer& out) {
  std::fill_n(static_cast<float*>(in.data()), kCount, static_cast<float>(comm.rank() + 1));
  const std::size_t all = kCount * static_cast<std::size_t>(comm.size());
  const int device = comm.rank() % fake_state().options.devices;
  comm.all_gather(view_in(in, device, kCount), view_in(out, device, all)).wait();
  const auto* const values = static_cast<const float*>(out.data());
  EXPECT_EQ(values[0], 1);
  EXPECT_EQ(values[all - 1], static_cast<float>(comm.size()));
}

/// Each rank allocates on a communicator for gathers and gathers twice.
void gather_on_child(Communicator& world) {
  const auto child = world.split(0, world.rank(), {.for_gathers = true});
  const Buffer in = symmetric(*child, kCount), out = symmetric(*child, 2 * kCount);
  expect_gather(*child, in, out);
  const Buffer later = symmetric(*child, kCount);
  expect_gather(*child, later, out);
}

TEST(NcclWindows, GathersRunBetweenWindowsByCopyEnginesIfWanted) {
  const auto gathers = [](const char* wanted) {
    const ScopedVariable variable("TESSERA_NCCL_COPY_ENGINES", wanted);
    reset_fake();
    run_ranks(2, gather_on_child);
    EXPECT_EQ(fake_counts().symmetric_calls, 4);
    EXPECT_EQ(fake_counts().copy_engine_calls, 2 * fake_counts().zero_policies);
    return fake_counts().copy_engine_calls;
  };
  EXPECT_EQ(gathers("1"), 4);
  EXPECT_EQ(gathers("0"), 0);
  reset_fake();
  run_ranks(2, gather_on_child);
  EXPECT_EQ(fake_counts().copy_engine_calls, 0) << "an abort can't end them";
  const ScopedVariable wrong("TESSERA_NCCL_COPY_ENGINES", "yes");
  for (const std::string& error : run_world(2, quick_options(), gather_on_child))
    EXPECT_THAT(error, testing::HasSubstr("TESSERA_NCCL_COPY_ENGINES: 'yes' is not a whole number from 0 to 1"));
}

TEST(NcclWindows, CommunicatorsForGathersHaveCopyEngines) {
  const ScopedVariable wanted("TESSERA_NCCL_COPY_ENGINES", "1");
  for (const bool non_blocking : {false, true}) {
    reset_fake({.non_blocking = non_blocking});
    run_ranks(2, gather_on_child);
    EXPECT_EQ(fake_counts().windows_made, 6);
    EXPECT_EQ(fake_counts().symmetric_calls, 4);
    EXPECT_EQ(fake_counts().copy_engine_calls, 4);
    EXPECT_EQ(fake_counts().zero_policies, 2) << "only the communicators for gathers";
  }
}

TEST(NcclWindows, OtherMemoryAndOtherCommunicatorsHaveNone) {
  const ScopedVariable wanted("TESSERA_NCCL_COPY_ENGINES", "1");
  reset_fake();
  run_ranks(2, [](Communicator& world) {
    const Buffer in = world.allocate(kCount * sizeof(float), MemoryKind::device, {});
    const Buffer out = world.allocate(2 * kCount * sizeof(float), MemoryKind::device, {});
    expect_gather(world, in, out);
    const auto child = world.split(0, world.rank());
    const Buffer of_child = symmetric(*child, 2 * kCount);
    EXPECT_TRUE(symmetric(*child, 16));  // too small for a window
    expect_gather(world, in, of_child);
  });
  EXPECT_EQ(fake_counts().windows_made, 2);
  EXPECT_EQ(fake_counts().symmetric_calls, 0);
  EXPECT_EQ(fake_counts().zero_policies, 0);
}

TEST(NcclWindows, OlderLibrariesHaveNone) {
  const ScopedVariable wanted("TESSERA_NCCL_COPY_ENGINES", "1");
  for (const int version : {22602, 22503}) {
    reset_fake({.version = version});
    run_ranks(2, gather_on_child);
    EXPECT_EQ(fake_counts().windows_made, 0);
    EXPECT_EQ(fake_counts().zero_policies, 0);
  }
  reset_fake({.version = 22703});
  run_ranks(2, gather_on_child);
  EXPECT_EQ(fake_counts().symmetric_calls, 4);
  EXPECT_EQ(fake_counts().zero_policies, 0) << "this version has windows, and no gathers by copy engines";
}

TEST(NcclWindows, IfOneRankFailsNoRankHasAWindow) {
  reset_fake({.window_fails = 1});
  run_ranks(2, gather_on_child);
  EXPECT_EQ(fake_counts().windows_made, 1) << "one attempt, on the rank where it does not fail";
  EXPECT_EQ(fake_counts().symmetric_calls, 0);
  reset_fake({.no_windows = true});
  run_ranks(2, gather_on_child);
  EXPECT_EQ(fake_counts().symmetric_calls, 0);
}

/// What rank 0 logs about windows while each of 2 ranks gathers.
std::vector<std::string> log_of_gathers(const CommunicatorDecorator& decorate = {}) {
  std::vector<std::string> lines;
  BackendOptions options = quick_options();
  options.communicator.logger = std::make_shared<Logger>(LogLevel::info, [&](LogLevel, std::string_view text) {
    if (text.find("symmetric") != std::string_view::npos) lines.emplace_back(text);
  });
  EXPECT_EQ(run_world(2, options, gather_on_child, fake_api(), decorate), std::vector<std::string>(2));
  EXPECT_EQ(fake_counts().complaint, "");
  return lines;
}

TEST(NcclWindows, WhyThereAreNoneIsLoggedOnce) {
  const ScopedVariable wanted("TESSERA_NCCL_COPY_ENGINES", "1");
  using Lines = std::vector<std::string>;
  reset_fake();
  EXPECT_EQ(log_of_gathers(), Lines{});
  EXPECT_EQ(fake_counts().windows_made, 6);

  reset_fake({.version = 22602});
  EXPECT_EQ(log_of_gathers(), Lines{"nccl: memory is not symmetric: rank 0: this version of NCCL has none, 2.27 and "
                                    "newer have"});
  reset_fake({.devices = 1, .version = 23001});
  EXPECT_EQ(log_of_gathers(), Lines{"nccl: memory is not symmetric: rank 0: ranks share a GPU"});
  EXPECT_EQ(fake_counts().windows_made, 0);

  ::setenv("TESSERA_NCCL_SYMMETRIC", "0", 1);
  reset_fake();
  EXPECT_EQ(log_of_gathers(), Lines{"nccl: memory is not symmetric: rank 0: TESSERA_NCCL_SYMMETRIC is 0"});
  EXPECT_EQ(fake_counts().windows_made, 0);
  EXPECT_EQ(fake_counts().zero_policies, 0);
  ::setenv("TESSERA_NCCL_SYMMETRIC", "yes", 1);
  for (const std::string& error : run_world(2, quick_options(), gather_on_child))
    EXPECT_THAT(error, testing::HasSubstr("TESSERA_NCCL_SYMMETRIC: 'yes' is not a whole number from 0 to 1"));
  ::unsetenv("TESSERA_NCCL_SYMMETRIC");
}

TEST(NcclWindows, DecoratorsPassThemOn) {
  reset_fake();
  log_of_gathers(
      [](auto world) { return harness::inject(std::move(world), {.kind = harness::FaultKind::drop, .call = 99}); });
  EXPECT_EQ(fake_counts().symmetric_calls, 4);
}

TEST(NcclWindows, OperationsMayBeInFlight) {
  reset_fake();
  run_ranks(2, [](Communicator& world) {
    const auto child = world.split(0, world.rank(), {.for_gathers = true});
    const Buffer in = symmetric(*child, kCount), out = symmetric(*child, 2 * kCount);
    // Rank 1 begins the first gather after rank 0 has come to the allocation.
    if (world.rank() == 1) std::this_thread::sleep_for(50ms);
    Work first = child->all_gather(view_in(in, world.rank(), kCount), view_in(out, world.rank(), 2 * kCount));
    const Buffer more = symmetric(*child, kCount);
    Work second = child->all_gather(view_in(more, world.rank(), kCount), view_in(out, world.rank(), 2 * kCount));
    first.wait();
    second.wait();
  });
  EXPECT_EQ(fake_counts().symmetric_calls, 4);
}

TEST(NcclWindows, CheckedModeFindsOtherPlaces) {
  // Rank 1 gathers to, or reduces from, another window or offset.
  const auto errors_of = [](bool reduces, std::size_t offset, bool other_window) {
    reset_fake();
    BackendOptions options = quick_options();
    options.check = true;
    return run_world(2, options, [&](Communicator& world) {
      const Buffer one = symmetric(world, 4 * kCount), two = symmetric(world, 4 * kCount);
      const bool differs = world.rank() == 1;
      const Buffer& large = differs && other_window ? two : one;
      View view = view_in(large, world.rank(), 2 * kCount);
      if (differs) view.data = static_cast<std::byte*>(view.data) + offset;
      const Buffer small = world.allocate(kCount * sizeof(float), MemoryKind::device, {});
      const View part = view_in(small, world.rank(), kCount);
      if (reduces)
        world.reduce_scatter(view, part, ReduceOp::sum()).wait();
      else
        world.all_gather(part, view).wait();
    });
  };
  EXPECT_EQ(errors_of(false, 0, false), std::vector<std::string>(2));
  EXPECT_EQ(errors_of(true, 0, false), std::vector<std::string>(2));
  for (const auto& errors : {errors_of(false, 64, false), errors_of(false, 0, true)})
    for (const std::string& error : errors) {
      EXPECT_THAT(error, testing::StartsWith("Mismatch:"));
      EXPECT_THAT(error, testing::HasSubstr("to window 1 + 0 bytes"));
    }
  for (const std::string& error : errors_of(true, 64, true)) {
    EXPECT_THAT(error, testing::StartsWith("Mismatch:"));
    EXPECT_THAT(error, testing::HasSubstr("from window 2 + 64 bytes"));
  }
}

TEST(NcclWindows, InPlaceIsTheOwnSliceOfOneWindow) {
  reset_fake();
  BackendOptions options = quick_options();
  options.check = true;
  run_ranks(
      2,
      [](Communicator& world) {
        const Buffer all = symmetric(world, 2 * kCount);
        const View whole = view_in(all, world.rank(), 2 * kCount);
        View own = view_in(all, world.rank(), kCount);
        own.data = static_cast<float*>(own.data) + kCount * static_cast<std::size_t>(world.rank());
        std::fill_n(static_cast<float*>(own.data), kCount, 1.0F);
        world.all_gather(own, whole).wait();
        world.reduce_scatter(whole, own, ReduceOp::sum()).wait();
        world.all_reduce(whole, whole, ReduceOp::sum()).wait();
      },
      options);
  EXPECT_EQ(fake_counts().symmetric_calls, 6);
}

TEST(NcclWindows, ARankThatFailsAloneIsNamed) {
  reset_fake({.window_fails = 1, .fails_early = true});
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& error : run_world(2, quick_options(), [](Communicator& world) { symmetric(world, kCount); }))
    EXPECT_THAT(error, testing::StartsWith("Timeout: allocate_symmetric of 4194304 bytes: rank 0 waits inside NCCL, "
                                           "where rank 1 has failed: nccl: ncclCommWindowRegister"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s) << "its timeout is 20 s";
  EXPECT_TRUE(all_freed());
}

TEST(NcclWindows, RanksThatNeedDifferentSizesFail) {
  reset_fake();
  const std::vector<std::string> errors = run_world(
      2, quick_options(), [](Communicator& world) { symmetric(world, kCount * (world.rank() == 0 ? 1 : 2)); });
  const std::string expected =
      "Mismatch: allocate_symmetric: the ranks need different sizes: rank 0 4194304 bytes, rank 1 8388608 bytes";
  EXPECT_EQ(errors, std::vector<std::string>(2, expected));
  EXPECT_TRUE(all_freed());
  EXPECT_EQ(fake_counts().complaint, "");
}

/// Three windows; rank 1 may keep the first one, so that NCCL would give the third one another offset there.
std::vector<std::string> reduce_in_third_window(bool rank_1_keeps_first) {
  reset_fake();
  return run_world(2, quick_options(), [&](Communicator& world) {
    Buffer first = symmetric(world, kCount);
    const Buffer second = symmetric(world, kCount);
    if (world.rank() == 0 || !rank_1_keeps_first) first.reset();
    const Buffer third = symmetric(world, kCount);
    const View all = view_in(third, world.rank(), kCount);
    std::fill_n(static_cast<float*>(all.data), kCount, 1.0F);
    world.all_reduce(all, all, ReduceOp::sum()).wait();
    EXPECT_EQ(*static_cast<float*>(all.data), 2);
  });
}

TEST(NcclWindows, RanksThatHaveReleasedOthersFail) {
  EXPECT_EQ(reduce_in_third_window(false), std::vector<std::string>(2));
  EXPECT_EQ(fake_counts().symmetric_calls, 2);
  EXPECT_EQ(fake_counts().complaint, "");
  const std::string expected =
      "Mismatch: allocate_symmetric: the ranks have not released the same buffers of earlier calls: rank 0 has 1 left, "
      "rank 1 has 2 left";
  EXPECT_EQ(reduce_in_third_window(true), std::vector<std::string>(2, expected));
  EXPECT_EQ(fake_counts().complaint, "");
  EXPECT_TRUE(all_freed());
}

TEST(NcclWindows, ARankThatDoesNotCallIsNamed) {
  reset_fake();
  BackendOptions options = quick_options();
  options.communicator.timeout = 300ms;
  const auto wait_for_failure = [](Communicator& world) {
    while (true) {
      std::this_thread::sleep_for(10ms);
      world.barrier({.timeout = 10s}).wait();
    }
  };
  const std::vector<std::string> errors = run_world(2, options, [&](Communicator& world) {
    if (world.rank() == 0) symmetric(world, kCount);
    wait_for_failure(world);
  });
  const std::string expected = "Timeout: allocate_symmetric of 4194304 bytes: rank 1 has not called it in time";
  EXPECT_EQ(errors, std::vector<std::string>(2, expected));
  const std::vector<std::string> closed = run_world(2, quick_options(), [](Communicator& world) {
    if (world.rank() == 0) symmetric(world, kCount);
  });
  EXPECT_EQ(closed.front(), "PeerLost: allocate_symmetric of 4194304 bytes: rank 1 has closed its communicator");
  EXPECT_TRUE(all_freed());
}

TEST(NcclWindows, AnAbortEndsARegistration) {
  reset_fake({.windows_hang = true});
  const std::vector<std::string> errors = run_world(2, quick_options(), [](Communicator& world) {
    std::future<void> aborts;
    if (world.rank() == 1)
      aborts = std::async(std::launch::async, [&world] {
        std::this_thread::sleep_for(100ms);
        world.abort("enough");
      });
    symmetric(world, kCount);
  });
  for (const std::string& error : errors) EXPECT_EQ(error.substr(0, 8), "Aborted:") << error;
  EXPECT_TRUE(all_freed());
  EXPECT_EQ(fake_counts().complaint, "");
}

TEST(NcclWindows, ARegistrationThatLastsTooLongFails) {
  reset_fake({.windows_hang = true});
  BackendOptions options = quick_options();
  options.communicator.timeout = 300ms;
  const std::vector<std::string> errors = run_world(2, options, [](Communicator& world) { symmetric(world, kCount); });
  for (const std::string& error : errors) EXPECT_EQ(error.substr(0, 8), "Timeout:") << error;
  EXPECT_TRUE(all_freed());
}

TEST(NcclWindows, MemoryMayOutliveTheCommunicatorAndItsFailure) {
  reset_fake();
  Buffer closed, failed;
  run_world(2, quick_options(), [&](Communicator& world) {
    Buffer mine = symmetric(world, kCount);
    if (world.rank() == 0) closed = std::move(mine);
    world.barrier().wait();
  });
  run_world(2, quick_options(), [&](Communicator& world) {
    Buffer mine = symmetric(world, kCount);
    if (world.rank() == 1) return;  // or the abort makes it throw
    failed = std::move(mine);
    world.abort("enough");
  });
  EXPECT_EQ(fake_counts().windows, 0);
  EXPECT_EQ(fake_counts().blocks, 2);
  closed.reset();
  failed.reset();
  EXPECT_TRUE(all_freed());
  EXPECT_EQ(fake_counts().complaint, "");
}

}  // namespace
}  // namespace tessera::nccl_test
