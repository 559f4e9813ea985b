// Decorators around a real backend: their effects are observed, and nothing else changes.
#include <unistd.h>
#include <array>

#include <algorithm>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "plugins/decorators/delay.h"
#include "plugins/decorators/trace.h"
#include "tests/plugins/decorators/support.h"

namespace tessera::decorators_test {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// --- all of them together leave the results alone

/// Calls every public operation once and checks each result against its definition.
void every_operation(Communicator& comm) {
  const auto n = static_cast<std::size_t>(comm.size());
  const auto r = static_cast<std::size_t>(comm.rank());
  const auto mine = static_cast<float>(r + 1);
  std::vector<float> one(1, mine);
  std::vector<float> all(n);
  std::vector<float> everyone(n);
  for (std::size_t i = 0; i < n; ++i) everyone[i] = static_cast<float>(i + 1);
  const auto in = view_of(one.data(), 1);
  const auto whole = view_of(all.data(), n);
  float got = 0;
  const auto out = view_of(&got, 1);

  comm.all_gather(in, whole).wait();
  EXPECT_EQ(all, everyone);
  comm.reduce_scatter(whole, out, ReduceOp::avg()).wait();
  EXPECT_EQ(got, mine);
  comm.broadcast(in, out, 1).wait();
  EXPECT_EQ(got, 2);
  comm.reduce(in, out, ReduceOp::sum(), 0).wait();
  if (r == 0) {
    EXPECT_EQ(got, sum_of_ranks(comm.size()));
  }
  comm.gather(in, whole, 0).wait();
  if (r == 0) {
    EXPECT_EQ(all, everyone);
  }
  comm.scatter(whole, out, 0).wait();
  EXPECT_EQ(got, mine);
  std::vector<float> other(n);
  std::fill(all.begin(), all.end(), mine);
  comm.all_to_all(whole, view_of(other.data(), n)).wait();
  EXPECT_EQ(other, everyone);

  const std::vector<std::size_t> counts(n, 1);
  comm.all_gather_v(in, whole, counts).wait();
  EXPECT_EQ(all, everyone);
  comm.reduce_scatter_v(whole, out, counts, ReduceOp::avg()).wait();
  EXPECT_EQ(got, mine);
  comm.gather_v(in, whole, counts, 0).wait();
  comm.scatter_v(whole, out, counts, 0).wait();
  EXPECT_EQ(got, mine);
  std::fill(all.begin(), all.end(), mine);
  comm.all_to_all_v(whole, counts, view_of(other.data(), n), counts).wait();
  EXPECT_EQ(other, everyone);

  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  const P2POp parts[] = {P2POp::send(in, next), P2POp::recv(out, previous)};
  comm.batch(parts).wait();
  EXPECT_EQ(got, static_cast<float>(previous + 1));
  if (r == 0) comm.send(in, 1).wait();
  if (r == 1) comm.recv(out, 0).wait();
  if (r == 1) {
    EXPECT_EQ(got, 1);
  }
  comm.barrier().wait();
  EXPECT_EQ(summed(comm, 5), std::vector<float>(5, sum_of_ranks(comm.size())));
}

TEST(Decorators, ForwardOperationsAndTraffic) {
  std::mutex mutex;
  std::vector<TrafficStats> plain(3);
  const auto record = [&](std::vector<TrafficStats>& into) {
    return [&](Communicator& comm) {
      every_operation(comm);
      const auto half = comm.split(comm.rank() == 2 ? -1 : 0, -comm.rank());
      EXPECT_EQ(half == nullptr, comm.rank() == 2);
      if (half != nullptr) {
        EXPECT_EQ(half->rank(), 1 - comm.rank());
      }
      if (half != nullptr) every_operation(*half);
      if (comm.rank() != 1) every_operation(*comm.create_group(std::array{2, 0}));
      const Buffer window = comm.allocate(64, MemoryKind::host, MemoryCategory::other);
      EXPECT_EQ(window.bytes(), 64u);
      EXPECT_EQ(comm.backend(), "shm");
      const std::lock_guard lock(mutex);
      into[static_cast<std::size_t>(comm.rank())] = comm.traffic();
    };
  };
  run_threads(3, quick_config(), record(plain));
  std::vector<TrafficStats> through(3);
  run_threads(3, decorated("delay:1ms;trace;fault:kill@9999"), record(through));
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(plain[r].by_kind, through[r].by_kind);
    EXPECT_EQ(plain[r].bytes_to_peer, through[r].bytes_to_peer);
  }
}

TEST(Decorators, ForwardErrorsAndAbort) {
  std::barrier summed_by_both(2);  // rank 1's abort would end rank 0's first sum
  run_threads(2, decorated("delay:1ms;trace"), [&](Communicator& comm) {
    std::vector<float> x(4);
    EXPECT_EQ(error_of([&] { comm.all_gather(view_of(x.data(), 4), view_of(x.data(), 4)); }),
              "InvalidUsage: all_gather: out has 4 elements, needs 8 (4 per rank x 2 ranks)");
    summed(comm, 4);
    summed_by_both.arrive_and_wait();
    if (comm.rank() == 1) comm.abort("enough");
    EXPECT_EQ(error_of([&] { summed(comm, 4); }), "Aborted: rank 1 aborted: enough");
  });
}

TEST(Decorators, NameTheAlgorithmThatRan) {
  run_threads(2, decorated("delay:1ms;trace"), [](Communicator& comm) {
    for (const auto& [count, name] :
         {std::pair(4U, "symmetric"), std::pair(1U << 18, "direct"), std::pair(4U, "symmetric")}) {
      summed(comm, count);
      EXPECT_EQ(comm.last_algorithm(), name) << count;
    }
  });
}

TEST(Decorators, WaitForLazyStreams) {
  run_threads(2, decorated("delay:1ms;trace;fault:kill@9999"), [](Communicator& comm) {
    const auto stream = make_lazy_stream();
    std::vector<float> x(8, 0);
    stream->run([&] { std::fill(x.begin(), x.end(), static_cast<float>(comm.rank() + 1)); });
    Work work = comm.all_reduce(view_of(x.data(), 8), view_of(x.data(), 8), ReduceOp::sum(), {.after = stream.get()});
    float seen = 0;
    work.wait_on(*stream);
    stream->run([&] { seen = x[0]; });
    stream->synchronize();
    EXPECT_EQ(seen, 3);
  });
}

TEST(Decorators, DropStreamOfEarlierCall) {
  run_threads(2, decorated("trace"), [](Communicator& comm) {
    const auto stream = make_lazy_stream();
    std::vector<float> x(8, 1);
    const auto view = view_of(x.data(), 8);
    comm.all_reduce(view, view, ReduceOp::sum(), {.after = stream.get()}).wait();
    bool ran = false;
    stream->run([&] { ran = true; });
    comm.all_reduce(view, view, ReduceOp::sum()).wait();
    EXPECT_FALSE(ran) << "the second call waited for the stream of the first";
    stream->synchronize();
    EXPECT_TRUE(ran);
  });
}

// --- delay

TEST(Delay, DelaysWorkButNotCaller) {
  run_threads(2, decorated("delay:400ms"), [](Communicator& comm) {
    std::vector<float> x(1000, 1);
    const Clock::time_point start = Clock::now();
    Work work = comm.all_reduce(view_of(x.data(), 1000), view_of(x.data(), 1000), ReduceOp::sum());
    EXPECT_LT(seconds_since(start), 0.35);  // the call is asynchronous
    EXPECT_FALSE(work.done());
    EXPECT_FALSE(work.wait_for(1ms));
    EXPECT_LT(seconds_since(start), 0.35);
    while (seconds_since(start) < 0.045) {  // the caller computes
    }
    work.wait();
    EXPECT_GE(seconds_since(start), 0.400);
    EXPECT_TRUE(work.done());
    EXPECT_EQ(x[0], 2);
  });
  // Control: without the decorator the same call is faster.
  run_threads(2, decorated(""), [](Communicator& comm) {
    comm.barrier().wait();
    const Clock::time_point start = Clock::now();
    summed(comm, 1000);
    EXPECT_LT(seconds_since(start), 0.35);
  });
}

TEST(Delay, DelaysNamedOperationByItsBytes) {
  run_threads(2, decorated("delay:1ms,bandwidth=1M,op=broadcast"), [](Communicator& comm) {
    std::vector<std::uint8_t> x(50 << 10, 1);
    const Clock::time_point start = Clock::now();
    comm.broadcast(view_of(x.data(), x.size()), view_of(x.data(), x.size()), 0).wait();
    EXPECT_GE(seconds_since(start), 0.049);  // 50 KiB at 1 MiB/s, and 1 ms
    const Clock::time_point later = Clock::now();
    summed(comm, 50 << 10);
    EXPECT_LT(seconds_since(later), 0.049);
  });
}

TEST(Delay, DependsOnSeedRankAndCall) {
  using decorators::delay_of;
  const decorators::DelayOptions options{.latency = 10ms, .seed = 1};
  decorators::DelayOptions other = options;
  other.seed = 2;
  EXPECT_EQ(delay_of(options, 0, 5, 0), delay_of(options, 0, 5, 100));
  EXPECT_NE(delay_of(options, 0, 5, 0), delay_of(options, 0, 6, 0));
  EXPECT_NE(delay_of(options, 0, 5, 0), delay_of(options, 1, 5, 0));
  EXPECT_NE(delay_of(options, 0, 5, 0), delay_of(other, 0, 5, 0));
  std::chrono::nanoseconds sum{};
  for (std::uint64_t call = 1; call <= 1000; ++call) {
    const auto delay = delay_of(options, 0, call, 0);
    EXPECT_GE(delay, 5ms);
    EXPECT_LE(delay, 15ms);
    sum += delay;
  }
  EXPECT_NEAR(std::chrono::duration<double>(sum).count(), 10.0, 0.5);
  EXPECT_EQ(delay_of({.latency = 10ms}, 3, 77, 0), 10ms);
}

TEST(Delay, AppliesToSplitsWithinDeadline) {
  run_threads(2, decorated("delay:60s"), [](Communicator& comm) {
    const auto child = comm.split(0, 0);
    const Clock::time_point start = Clock::now();
    summed(*child, 10, {.timeout = 30ms});
    EXPECT_GE(seconds_since(start), 0.030);
    EXPECT_LT(seconds_since(start), 10.0);
  });
}

// --- trace

TEST(Trace, WritesOneLinePerOperation) {
  Lines lines;
  InitOptions config = decorated("trace");
  config.logger =
      std::make_shared<Logger>(LogLevel::info, [&](LogLevel, std::string_view text) { lines.add(std::string(text)); });
  run_threads(2, config, [](Communicator& comm) {
    summed(comm, 256, {.label = "block.3"});
    const auto child = comm.split(comm.rank(), 0);
    child->barrier().wait();
  });
  ASSERT_EQ(lines.get().size(), 4u);
  const auto count = [&](std::string_view start, std::string_view end) {
    return std::count_if(lines.get().begin(), lines.get().end(),
                         [&](const std::string& line) { return line.starts_with(start) && line.ends_with(end); });
  };
  EXPECT_EQ(count("trace: all_reduce #1 (block.3) 1024 bytes ", "us"), 2);
  EXPECT_EQ(count("trace: barrier #2 0 bytes ", "us"), 2);
}

TEST(Trace, IncludesInnerDelayAndErrors) {
  std::mutex mutex;
  std::vector<decorators::OperationEvent> events;
  InitOptions config = quick_config();
  config.decorate = [&](std::unique_ptr<Communicator> world) -> std::unique_ptr<Communicator> {
    auto delayed = decorators::decorate(std::move(world), "delay:20ms,op=barrier");
    return std::make_unique<decorators::TraceDecorator>(std::move(delayed),
                                                        [&](const decorators::OperationEvent& event) {
                                                          const std::lock_guard lock(mutex);
                                                          events.push_back(event);
                                                        });
  };
  std::barrier dropped(2);  // rank 0's abort would end rank 1's second barrier
  run_threads(2, config, [&](Communicator& comm) {
    comm.barrier().wait();
    { const Work dropped_unwaited = comm.barrier(); }
    dropped.arrive_and_wait();
    if (comm.rank() == 0) comm.abort("enough");
    EXPECT_NE(error_of([&] { comm.barrier().wait(); }), "");
  });
  ASSERT_EQ(events.size(), 6u);
  for (const decorators::OperationEvent& event : events) {
    EXPECT_EQ(event.operation, "barrier");
    EXPECT_EQ(event.error, event.number < 3 ? "" : "Aborted: rank 0 aborted: enough");
    if (event.number < 3) {
      EXPECT_GE(event.end_ns - event.start_ns, 20'000'000);
    }
  }
}

TEST(Trace, FileIsChromeTrace) {
  const std::string path = testing::TempDir() + "tessera-trace-" + std::to_string(::getpid());
  run_threads(2, decorated("trace:" + path), [](Communicator& comm) {
    summed(comm, 256, {.label = "a \"label\""});
    comm.split(0, 0)->barrier().wait();
  });
  for (const int rank : {0, 1}) {
    const std::string file = path + ".rank" + std::to_string(rank) + ".json";
    std::ifstream in(file);
    const auto trace = nlohmann::json::parse(in).at("traceEvents");
    std::filesystem::remove(file);
    std::map<std::string, int> phases;
    for (const auto& event : trace) {
      EXPECT_EQ(event.at("pid"), rank);
      ++phases[event.at("ph")];
      if (event.at("ph") != "b" || event.at("id") != 1) continue;
      EXPECT_EQ(event.at("name"), "all_reduce a \"label\"");
      EXPECT_EQ(event.at("args").at("bytes"), 1024);
    }
    EXPECT_EQ(phases, (std::map<std::string, int>{{"M", 3}, {"b", 2}, {"e", 2}}));  // a process, two tracks
  }
  Lines lines;
  InitOptions config = decorated("trace:/nowhere/at/all");
  config.logger =
      std::make_shared<Logger>(LogLevel::warn, [&](LogLevel, std::string_view text) { lines.add(std::string(text)); });
  run_threads(1, config, [](Communicator& comm) { comm.barrier().wait(); });
  EXPECT_EQ(lines.get(), std::vector<std::string>{"trace: /nowhere/at/all.rank0.json: can't write it"});
}

}  // namespace
}  // namespace tessera::decorators_test
