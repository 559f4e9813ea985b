#include "tessera/base/device_runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "tessera/base/device/module_loader.h"
#include "tessera/base/error.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/process.h"

namespace tessera::base {
namespace {

using testing::HasSubstr;

struct NobodysTable {
  static constexpr std::string_view kInterface = "nobody's";
};

TEST(DeviceRuntime, HostCopiesAndFillsInStreamOrder) {
  const auto cpu = open_device({});
  EXPECT_TRUE(cpu->host_accessible());
  EXPECT_GT(cpu->properties().memory_bytes, 0U);
  const auto lazy = make_lazy_stream();
  int from = 7, to = 0;
  cpu->copy(*lazy, CopyDirection::host_to_device, &to, &from, sizeof to);
  from = 8;
  cpu->fill(*lazy, &from, 0, sizeof from);
  EXPECT_EQ(to, 0) << "nothing has run";
  lazy->synchronize();
  EXPECT_EQ(to, 8);
  EXPECT_EQ(from, 0);
  EXPECT_EQ(cpu->find<NobodysTable>(), nullptr);
}

TEST(DeviceRuntime, MetaHasShapesButNoData) {
  const auto meta = open_device({DeviceType::meta, 0});
  void* const a = meta->allocate(std::size_t{1} << 50);
  void* const b = meta->allocate(0);
  EXPECT_NE(a, b);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % kAlignment, 0U);
  EXPECT_DEATH(*static_cast<volatile char*>(a) = 1, "");
  const auto stream = meta->make_stream();
  int host = 3;
  meta->copy(*stream, CopyDirection::host_to_device, a, &host, sizeof host);
  meta->fill(*stream, a, 0, 1000);
  EXPECT_THROW(meta->copy(*stream, CopyDirection::device_to_host, &host, a, sizeof host), InvalidUsage);
  EXPECT_EQ(host, 3);
  EXPECT_DEATH(*static_cast<volatile int*>(a) = 1, "");
}

TEST(DeviceRuntime, RejectsIpcWithoutSupport) {
  const auto cpu = open_device({});
  EXPECT_FALSE(cpu->traits().shares_memory);
  void* const data = cpu->allocate(64);
  EXPECT_THROW(cpu->get_ipc_handle(data, 64), Unsupported);
  EXPECT_THROW(cpu->open_ipc_handle({}), Unsupported);
  cpu->free(data, 64);
}

TEST(Process, ForkIsAnotherProcess) {
  const ProcessIdentity own = this_process();
  EXPECT_EQ(this_process(), own);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(this_process() == own ? 1 : 0);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(DeviceRuntime, DevicesAreDescribedOrUnavailableWithReason) {
  const std::vector<DeviceInfo> states = list_devices();
  ASSERT_GE(states.size(), 2U);
  EXPECT_EQ(states[0].name, "cpu");
  EXPECT_EQ(states[1].name, "meta");
  for (const DeviceInfo& state : states) {
    EXPECT_EQ(state.available, state.reason.empty()) << state.name << ": " << state.reason;
    if (state.available) {
      EXPECT_NE(open_device(parse_device(state.name)), nullptr);
    } else {
      EXPECT_THROW(open_device(parse_device(state.name)), InvalidUsage);
    }
  }
}

std::string refusal(const std::string& path) {
  try {
    load_device_module(path);
  } catch (const InvalidUsage& error) {
    return error.what();
  }
  return "loaded";
}

TEST(DeviceModules, RejectsModuleWithReason) {
  const std::string directory = TESSERA_TEST_DEVICES;
  EXPECT_EQ(refusal(directory + "/abacus.so"), "loaded");
  EXPECT_EQ(load_device_module(directory + "/abacus.so")->probe().problem, "a bead is missing");
  EXPECT_THAT(refusal(directory + "/otherabi.so"), HasSubstr("'tessera 0, punched cards'"));
  EXPECT_THAT(refusal(directory + "/otherabi.so"), HasSubstr("'" TESSERA_ABI "'"));
  EXPECT_THAT(refusal(directory + "/othersize.so"), HasSubstr("bytes, but this library's"));
  EXPECT_THAT(refusal(directory + "/misnamed.so"), HasSubstr("rename the file to abacus.so"));
  EXPECT_THAT(refusal(directory + "/noentry.so"), HasSubstr("no tessera_device_entry()"));
  EXPECT_THAT(refusal(directory + "/nothere.so"), HasSubstr("nothere.so"));
}

/// Counts a pool's calls of a device.
class CountingRuntime final : public DeviceRuntime {
 public:
  CountingRuntime() : DeviceRuntime({DeviceType::cuda, 0}, {.slow_allocation = true}) {}
  DeviceProperties properties() const override { return {}; }
  std::unique_ptr<Stream> make_stream() override { return make_immediate_stream(); }
  void* allocate(std::size_t bytes) override {
    ++allocations;
    held += bytes;
    return std::malloc(bytes);
  }
  void free(void* data, std::size_t bytes) noexcept override {
    held -= bytes;
    std::free(data);
  }
  void* allocate_host(std::size_t bytes) override { return std::malloc(bytes); }
  void free_host(void* data, std::size_t) noexcept override { std::free(data); }
  void copy(Stream&, CopyDirection, void*, const void*, std::size_t) override {}
  void fill(Stream&, void*, unsigned char, std::size_t) override {}
  void synchronize() override {}
  const void* find(std::string_view) const noexcept override { return nullptr; }
  int allocations = 0;
  std::size_t held = 0;
};

TEST(DevicePool, LaterStepsAllocateNothingFromDevice) {
  const auto runtime = std::make_shared<CountingRuntime>();
  const auto memory_tracker = std::make_shared<MemoryTracker>();
  {
    MemoryPool pool(memory_tracker, {}, runtime);
    const auto step = [&] {
      std::vector<Buffer> live;
      for (std::size_t i = 0; i < 60; ++i) live.push_back(pool.allocate(i * i * 1777, MemoryCategory::activation));
      while (live.size() > 20) live.erase(live.begin() + static_cast<long>(live.size() / 2));
      for (std::size_t i = 0; i < 30; ++i) live.push_back(pool.allocate(i * 100'000, MemoryCategory::activation));
    };
    step();
    const int first = runtime->allocations;
    EXPECT_GT(first, 0);
    for (int i = 0; i < 5; ++i) step();
    EXPECT_EQ(runtime->allocations, first);
    EXPECT_EQ(memory_tracker->snapshot().total_now, 0U);
    EXPECT_GT(runtime->held, 0U);
  }
  EXPECT_EQ(runtime->held, 0U);
}

TEST(DevicePool, SmallBlocksShareSlabAndAreTracked) {
  const auto runtime = std::make_shared<CountingRuntime>();
  const auto memory_tracker = std::make_shared<MemoryTracker>();
  MemoryPool pool(memory_tracker, {}, runtime);
  std::vector<Buffer> live;
  for (std::size_t i = 0; i < 1000; ++i) {
    live.push_back(pool.allocate(1 + i % 1500, MemoryCategory::gradient));
    std::memset(live.back().data(), static_cast<int>(i % 251), live.back().bytes());
  }
  EXPECT_EQ(runtime->allocations, 1);
  std::size_t sum = 0;
  for (std::size_t i = 0; i < live.size(); ++i) {
    sum += live[i].bytes();
    for (std::size_t at = 0; at < live[i].bytes(); ++at)
      ASSERT_EQ(std::to_integer<std::size_t>(*live[i].bytes_at(at)), i % 251) << "blocks overlap";
  }
  EXPECT_EQ(memory_tracker->snapshot().now_of(MemoryCategory::gradient), sum);
  EXPECT_EQ(memory_tracker->snapshot().total_peak + memory_tracker->snapshot().reserved, runtime->held);
}

}  // namespace
}  // namespace tessera::base
