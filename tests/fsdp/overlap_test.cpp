// Overlap of communication and computation: with collectives as long as a unit's compute, both of which only sleep, a
// step exposes no more than the first gather and the last reduction.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using base::TraceEvent;
using base::TraceEventKind;

constexpr auto kCompute = std::chrono::milliseconds(20);
constexpr int kLayers = 5;

/// Takes kCompute in forward and in backward, and uses no core.
class Slow final : public nn::Layer<Slow> {
 public:
  explicit Slow(nn::Context& context)
      : Layer(context), linear_(add<nn::Linear>("linear", nn::LinearOptions{.in = 8, .out = 8})) {
    mark_block();
  }
  nn::Tensor forward(const nn::Tensor& x) {
    const nn::Tensor y = linear_(x);
    nn::Tensor later = nn::Tensor::empty(context(), y.shape(), y.dtype());
    std::copy_n(y.data<float>(), y.count(), later.data<float>());
    std::this_thread::sleep_for(kCompute);
    if (nn::Tape* tape = nn::recording({y}, later))
      tape->record("sleep", later, [dy = y.gradient(), dlater = later.gradient()] {
        std::this_thread::sleep_for(kCompute);
        dy->accumulate(dlater->value());
      });
    return later;
  }

 private:
  nn::Linear& linear_;
};

class SlowModel final : public nn::Layer<SlowModel> {
 public:
  explicit SlowModel(nn::Context& context) : Layer(context) {
    for (int i = 0; i < kLayers; ++i) layers_.push_back(&add<Slow>("h." + std::to_string(i)));
  }
  nn::Tensor forward(nn::Tensor x) {
    for (Slow* layer : layers_) x = (*layer)(x);
    return x;
  }

 private:
  std::vector<Slow*> layers_;
};

/// kGood of the kSteps steps after the first must stay within a bound. The scheduler of a machine shared with other
/// programs makes single steps miss it; an engine with a needless wait misses it in every step.
constexpr int kSteps = 8;
constexpr int kGood = 4;

constexpr int kCollective = 20;  // ms
using Clock = std::chrono::steady_clock;

/// Done kCollective after its call at the earliest.
class DelayedWork final : public comm::WorkState {
 public:
  DelayedWork(comm::Work inner, comm::CompletionPoller& completions)
      : inner_(std::move(inner)), completions_(completions) {}
  bool done() noexcept override { return inner_.done() && Clock::now() >= ready_; }
  bool wait_until(Clock::time_point until) override {
    if (!inner_.wait_until(until)) return false;
    std::this_thread::sleep_until(std::min(until, ready_));
    return Clock::now() >= ready_;
  }
  void wait() override { wait_until(Clock::time_point::max()); }
  void on_done(comm::WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 private:
  void recycle() noexcept override { delete this; }
  comm::Work inner_;
  comm::CompletionPoller& completions_;
  const Clock::time_point ready_ = Clock::now() + std::chrono::milliseconds(kCollective);
};

/// Each collective takes kCollective, counted from the rank's own call: over slow links it would be counted from the
/// last rank's, and ranks that wake up one after the other would seem to wait too long.
class Delayed final : public comm::Decorator {
 public:
  explicit Delayed(std::unique_ptr<comm::Communicator> inner) : Decorator(std::move(inner)) {}

 private:
  comm::Work do_start(const comm::OpDesc& call) override {
    return comm::Work(new DelayedWork(Decorator::do_start(call), completions_));
  }
  std::unique_ptr<comm::Communicator> decorate(std::unique_ptr<comm::Communicator> child) override {
    return std::make_unique<Delayed>(std::move(child));
  }
  comm::CompletionPoller completions_;
};

/// Largest exposed communication of the kGood best steps, on the rank that waited longest.
double exposed_ms(const std::string& backend, const std::string& strategy, int prefetch) {
  std::vector<std::vector<double>> waited(2);
  comm::InitOptions config;
  config.backend = backend;
  config.decorate = [](auto world) { return std::make_unique<Delayed>(std::move(world)); };
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
    SlowModel model(context);
    EngineOptions options = harness::engine_for(strategy);
    options.prefetch = prefetch;
    Engine engine(model, world, options);
    engine.initialize(0);
    for (int step = 0; step <= kSteps; ++step) {
      nn::Tape tape;
      nn::Tensor loss;
      {
        const nn::TapeScope recording(context, &tape);
        const nn::Tensor x = nn::Tensor::zeros(context, {4, 8}, base::DType::f32);
        loss = nn::ops::cross_entropy(model(x), nn::Tensor::zeros(context, {4}, base::DType::i32));
      }
      tape.backward(loss);
      engine.step(1e-3);
      double exposed = 0;
      for (const TraceEvent& event : engine.trace().drain())
        if (event.kind == TraceEventKind::unshard_wait || event.kind == TraceEventKind::reduce_wait)
          exposed += static_cast<double>(event.duration_ns()) / 1e6;
      if (step > 0) waited[static_cast<std::size_t>(world.rank())].push_back(exposed);
    }
  });
  for (std::vector<double>& steps : waited) std::sort(steps.begin(), steps.end());
  return std::max(waited[0].at(kGood - 1), waited[1].at(kGood - 1));
}

/// Acceptance item 6, over shared memory and over sockets.
class OverlapOver : public testing::TestWithParam<std::string> {
 protected:
  static double exposed(const std::string& strategy, int prefetch) {
    return exposed_ms(GetParam(), strategy, prefetch);
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, OverlapOver, testing::Values("shm", "tcp"),
                         [](const auto& test) { return test.param; });

TEST_P(OverlapOver, P06_FsdpExposesFirstGatherAndLastReduction) {
  EXPECT_LE(exposed("fsdp", 1), 1.15 * 2 * kCollective);
  // The control: without prefetch every gather of forward is exposed, and every one of backward except the last unit's.
  EXPECT_GE(exposed("fsdp", 0), (2 * kLayers - 1 + 1) * kCollective * 0.95);
}

TEST_P(OverlapOver, P06_DdpExposesLastReduction) { EXPECT_LE(exposed("ddp", 1), 1.15 * kCollective); }

/// After the step each unit's parameters are gathered, in the order of the next forward; only the first gather is
/// exposed.
TEST_P(OverlapOver, P06_ZeroExposesLastReductionAndFirstGather) {
  EXPECT_LE(exposed("zero1", 1), 1.15 * 2 * kCollective);
  EXPECT_LE(exposed("zero2", 1), 1.15 * 2 * kCollective);
}

struct Peeked {
  const float* last = nullptr;  // a value of the last unit's shard
  float before = 0;             // its value before the update
  bool everything = false;      // the control: waits for all queued work
  base::Stream* compute = nullptr;
  int gathers = 0, updated = 0;
};

/// Waits for the work that the root's gather depends on, and checks whether the last unit has been updated by then.
class Peeking final : public CollectivePlugin {
 public:
  explicit Peeking(std::map<std::thread::id, Peeked>& peeked, std::mutex& mutex) : peeked_(peeked), mutex_(mutex) {}
  WorkChain run(const CollectiveCall& call) override {
    Peeked* const mine = own();
    if (call.options.label == "root" && mine->last != nullptr) {
      if (mine->everything) mine->compute->synchronize();
      call.options.after->synchronize();
      ++mine->gathers;
      mine->updated += *mine->last != mine->before ? 1 : 0;
    }
    WorkChain works;
    for (const FlatTransfer& t : call.transfers) works.add(call.channel.all_gather(t.in, t.out, call.options));
    return works;
  }

 private:
  Peeked* own() {
    const std::lock_guard lock(mutex_);
    return &peeked_[std::this_thread::get_id()];
  }
  std::map<std::thread::id, Peeked>& peeked_;
  std::mutex& mutex_;
};

/// How often the last unit was updated before the first gather of the next step, and the number of such gathers.
std::pair<int, int> updated_before_the_first_gather(bool everything) {
  std::map<std::thread::id, Peeked> peeked;
  std::mutex mutex;
  harness::TrainingSpec spec;
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    nn::Context context(
        {.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = base::make_lazy_stream});
    const auto model = nn::make_model(context, spec.model);
    EngineOptions options = harness::engine_for("fsdp");
    options.collectives.add(comm::OpKind::all_gather, "peeking",
                            [&] { return std::make_unique<Peeking>(peeked, mutex); });
    options.strategy.all_gather = "peeking";
    Engine engine(*model, world, options);
    engine.initialize(0);
    const auto forward_backward = [&](int step) {
      const auto batch = harness::make_batch(context, spec, step, world.rank());
      harness::forward_backward(*model, batch);
    };
    forward_backward(0);
    context.stream().synchronize();
    {
      const std::lock_guard lock(mutex);
      Peeked& mine = peeked[std::this_thread::get_id()];
      mine.everything = everything;
      mine.compute = &context.stream();
      engine.state().for_each_shard([&](const ShardRange& own) {
        if (own.parameter.name().starts_with("h.1.") && own.state < 0) mine.last = static_cast<const float*>(own.data);
      });
      mine.before = *mine.last;
    }
    engine.step(1e-2);
    forward_backward(1);
  });
  int updated = 0, gathers = 0;
  for (const auto& [thread, mine] : peeked) {
    updated += mine.updated;
    gathers += mine.gathers;
  }
  return {updated, gathers};
}

/// The first gather of a step depends on the first unit's update only; it may run while the others are updated.
TEST(Overlap, FirstGatherWaitsForFirstUpdateOnly) {
  EXPECT_EQ(updated_before_the_first_gather(false), std::pair(0, 2));
  EXPECT_EQ(updated_before_the_first_gather(true), std::pair(2, 2));
}

}  // namespace
}  // namespace tessera::fsdp
