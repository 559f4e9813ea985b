// Communicators around another one: they pass on everything that they do not change.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <filesystem>
#include <functional>

#include "tessera/comm/core/decorator.h"
#include "tessera/comm/core/worlds.h"
#include "tessera/comm/flight_recorder.h"
#include "tessera/comm/slow_link/slow_link.h"
#include "tessera/comm/staging.h"
#include "tests/comm/decorators_support.h"
#include "tests/harness/guarded_device.h"

namespace tessera::comm_test {
namespace {

using Wrap = std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>;

std::string flights() {
  return (std::filesystem::temp_directory_path() / ("decorators-" + std::to_string(::getpid()))).string();
}

struct Kind {
  const char* name;
  Wrap wrap;
  bool passes_streams_on = true;
};

const std::array<Kind, 5>& kinds() {
  static const std::array<Kind, 5> kinds = {
      Kind{"SlowLink",
           [](auto world) {
             return slow_links(std::move(world), {.link = {100us, 1e9}, .intra = {}, .hosts = 1});
           }},
      Kind{"FlightRecorder", [](auto world) { return record_flight(std::move(world), flights()); }},
      Kind{"Composite",
           [](auto world) {
             auto near = world->split(0, world->rank());
             return compose(std::move(near), std::move(world));
           }},
      Kind{"Staging",
           [](auto world) {
             return stage(std::move(world), harness::make_guarded_device({}), {.negotiates_ipc = false});
           },
           false},  // it knows itself what a call comes after
      Kind{"Fault",
           [](auto world) { return harness::inject(std::move(world), {.kind = FaultKind::kill, .call = 9999}); }}};
  return kinds;
}

class Decorators : public testing::TestWithParam<Kind> {
 protected:
  ~Decorators() override { std::filesystem::remove_all(flights()); }
  static InitOptions decorated() {
    InitOptions config = quick_config();
    config.decorate = GetParam().wrap;
    return config;
  }
};
INSTANTIATE_TEST_SUITE_P(Kinds, Decorators, testing::ValuesIn(kinds()),
                         [](const auto& test) { return std::string(test.param.name); });

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

TEST_P(Decorators, ForwardOperationsAndTraffic) {
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
  run_threads(3, decorated(), record(through));
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(plain[r].by_kind, through[r].by_kind);
    EXPECT_EQ(plain[r].bytes_to_peer, through[r].bytes_to_peer);
  }
}

TEST_P(Decorators, ForwardErrorsAndAbort) {
  std::barrier summed_by_both(2);  // rank 1's abort would end rank 0's first sum
  run_threads(2, decorated(), [&](Communicator& comm) {
    std::vector<float> x(4);
    EXPECT_EQ(error_of([&] { comm.all_gather(view_of(x.data(), 4), view_of(x.data(), 4)); }),
              "InvalidUsage: all_gather: out has 4 elements, needs 8 (4 per rank x 2 ranks)");
    summed(comm, 4);
    summed_by_both.arrive_and_wait();
    if (comm.rank() == 1) comm.abort("enough");
    EXPECT_EQ(error_of([&] { summed(comm, 4); }), "Aborted: rank 1 aborted: enough");
  });
}

TEST_P(Decorators, NameTheAlgorithmThatRan) {
  run_threads(2, decorated(), [](Communicator& comm) {
    EXPECT_EQ(comm.last_algorithm(), "");
    for (const auto& [count, name] :
         {std::pair(4U, "symmetric"), std::pair(1U << 18, "direct"), std::pair(4U, "symmetric")}) {
      summed(comm, count);
      EXPECT_EQ(comm.last_algorithm(), name) << count;
    }
  });
}

TEST_P(Decorators, WaitForLazyStreams) {
  run_threads(2, decorated(), [](Communicator& comm) {
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

/// Counts the calls of what a communicator passes on only if it says so.
class Noting final : public Decorator {
 public:
  struct Counts {
    std::atomic<int> symmetric{0}, after{0};
  };
  Noting(std::unique_ptr<Communicator> inner, Counts& counts) : Decorator(std::move(inner)), counts_(counts) {}

 private:
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    ++counts_.symmetric;
    return Decorator::do_allocate_symmetric(bytes, kind, use);
  }
  void do_after(Stream& stream) override {
    ++counts_.after;
    Decorator::do_after(stream);
  }
  std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) override {
    return std::make_unique<Noting>(std::move(child), counts_);
  }
  Counts& counts_;
};

TEST_P(Decorators, PassOnSymmetricMemoryAndStreams) {
  Noting::Counts counts;
  InitOptions config = quick_config();
  config.decorate = [&](auto world) { return GetParam().wrap(std::make_unique<Noting>(std::move(world), counts)); };
  run_threads(2, config, [](Communicator& comm) {
    const Buffer window = comm.allocate_symmetric(64, MemoryKind::host, MemoryCategory::other);
    EXPECT_EQ(window.bytes(), 64u);
    const auto stream = make_immediate_stream();
    comm.barrier({.after = stream.get()}).wait();
  });
  EXPECT_EQ(counts.symmetric, 2);
  EXPECT_EQ(counts.after, GetParam().passes_streams_on ? 2 : 0);
}

}  // namespace
}  // namespace tessera::comm_test
