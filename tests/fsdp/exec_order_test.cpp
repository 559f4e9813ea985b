// Gather order of units as set by the program; errors for ranks whose execution orders differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/nn/layers/linear.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tests/fsdp/training_specs.h"
#include "tests/harness/device_only.h"

namespace tessera::fsdp {
namespace {

using base::TraceEventKind;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(PrefetchOrder, BackwardPostGathersAfterCompute) {
  TrainingSpec spec = base_spec("fsdp");
  const TrainingRecord pre = train(spec);
  spec.engine.backward_prefetch = BackwardPrefetch::post;
  const TrainingRecord post = train(spec);
  EXPECT_THAT(event_names(post.last_events,
                          {TraceEventKind::unshard_issue, TraceEventKind::backward, TraceEventKind::reduce_issue}),
              ElementsAre("unshard_issue root", "unshard_issue h.0", "unshard_issue h.1", "unshard_issue h.2",  //
                          "backward root", "backward h.2", "unshard_issue h.1", "reduce_issue h.2",             //
                          "backward h.1", "unshard_issue h.0", "reduce_issue h.1",                              //
                          "backward h.0", "reduce_issue h.0", "reduce_issue root"));
  EXPECT_TRUE(same_bits(pre, post));
}

TEST(PrefetchOrder, FollowsProgram) {
  TrainingSpec spec = base_spec("fsdp");
  const TrainingRecord neighbours = train(spec);
  spec.engine.prefetch_order.forward = {{"root", {"h.0", "h.1"}}, {"h.0", {"h.2"}}};
  spec.engine.prefetch_order.backward = {{"h.2", {"h.0", "h.1"}}};
  spec.engine.poison = true;
  const TrainingRecord own = train(spec);
  EXPECT_THAT(
      event_names(own.last_events, {TraceEventKind::unshard_issue, TraceEventKind::forward, TraceEventKind::backward}),
      ElementsAre("unshard_issue root", "unshard_issue h.0", "unshard_issue h.1", "forward root", "unshard_issue h.2",
                  "forward h.0", "forward h.1", "forward h.2",  //
                  "backward root", "unshard_issue h.0", "unshard_issue h.1", "backward h.2", "backward h.1",
                  "backward h.0"));
  EXPECT_TRUE(same_bits(neighbours, own));
}

/// An unneeded prefetch is resharded, and a unit without prefetch is gathered when it is used.
TEST(PrefetchOrder, WrongOrderCostsTimeOnly) {
  TrainingSpec spec = base_spec("fsdp");
  const TrainingRecord right = train(spec);
  spec.engine.prefetch_order.forward = {{"h.1", {"h.0"}}};
  spec.engine.prefetch_order.backward = {{"h.1", {"h.2"}}, {"h.0", {"h.1"}}};
  spec.engine.poison = true;
  const TrainingRecord wrong = train(spec);
  EXPECT_TRUE(same_bits(right, wrong));
  EXPECT_GT(wrong.all_later.all_gather.calls, right.all_later.all_gather.calls);
  for (const auto& memory_tracker : wrong.memory_trackers)
    EXPECT_EQ(memory_tracker.now_of(base::MemoryCategory::unsharded_parameter), 0U);
}

TEST(PrefetchOrder, RejectsUnknownUnits) {
  TrainingSpec spec = base_spec("fsdp");
  spec.engine.prefetch_order.forward = {{"h.0", {"h.7"}}};
  try {
    train(spec);
    FAIL();
  } catch (const base::InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("no unit 'h.7'; use one of root h.0 h.1 h.2"));
  }
}

// --- ranks with different execution orders

/// Two layers of the same shape; the rank chooses which one runs first.
class TwoBranches final : public nn::Layer<TwoBranches> {
 public:
  explicit TwoBranches(nn::Context& context)
      : Layer(context),
        a_(add<nn::Linear>("a", nn::LinearOptions{.in = 8, .out = 8})),
        b_(add<nn::Linear>("b", nn::LinearOptions{.in = 8, .out = 8})) {}
  nn::Tensor forward(const nn::Tensor& x, bool swapped, bool skips) {
    if (skips) return a_(x);
    return swapped ? a_(b_(x)) : b_(a_(x));
  }

 private:
  nn::Linear &a_, &b_;
};

struct OrderMismatch {
  std::string strategy;
  std::string backend = "shm";
  bool swaps = false;
  bool skips = false;
  int from = 1;                        ///< step
  bool applies_requires_grad = false;  ///< just before it
  bool checked = false;
  std::shared_ptr<base::DeviceRuntime> device = {};  ///< if set: the communicator accepts only its memory
};

struct Reports {
  std::vector<std::string> by_rank;
  int steps = 0;  // completed by the first rank
  double seconds = 0;
};

Reports run_two_branches(const OrderMismatch& how) {
  Reports reports;
  reports.by_rank.resize(2);
  comm::InitOptions config;
  config.backend = how.backend;
  config.timeout = std::chrono::seconds(3);
  config.check = how.checked;
  config.device = how.device;
  if (how.device != nullptr)
    config.decorate = [](auto world) { return std::make_unique<harness::DeviceOnly>(std::move(world)); };
  const auto start = std::chrono::steady_clock::now();
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    nn::Context context({.threads = 1,
                         .memory_tracker = world.memory_tracker(),
                         .memory = {},
                         .make_stream = {},
                         .device = {},
                         .runtime = how.device});
    TwoBranches model(context);
    EngineOptions options = engine_for(how.strategy);
    options.wrap = "a;b";
    try {
      Engine engine(model, world, options);
      engine.initialize(0);
      for (int step = 0; step < 4; ++step) {
        const bool other = world.rank() == 1 && step >= how.from;
        if (how.applies_requires_grad && step == how.from) engine.apply_requires_grad();
        nn::Tape tape;
        nn::Tensor loss;
        {
          const nn::TapeScope recording(context, &tape);
          const nn::Tensor x = nn::Tensor::zeros(context, {4, 8}, base::DType::f32);
          const nn::Tensor targets = nn::Tensor::zeros(context, {4}, base::DType::i32);
          loss = nn::ops::cross_entropy(model(x, how.swaps && other, how.skips && other), targets);
        }
        tape.backward(loss);
        engine.step(1e-3);
        if (world.rank() == 0) ++reports.steps;
      }
    } catch (const base::Error& error) {
      reports.by_rank[static_cast<std::size_t>(world.rank())] = std::string(error.kind()) + ": " + error.what();
    }
  });
  reports.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return reports;
}

constexpr const char* kDifferent = "execution order: the ranks differ: rank 0: ";

TEST(ExecutionOrder, P14_InitialMismatchIsReportedBeforeFirstBackward) {
  const std::string backward = "the first backward";
  for (const char* backend : {"shm", "tcp"})
    for (const char* strategy : {"fsdp", "shard_grad_op"}) {
      const Reports reports = run_two_branches({.strategy = strategy, .backend = backend, .swaps = true, .from = 0});
      EXPECT_EQ(reports.steps, 0);
      EXPECT_LT(reports.seconds, 2);
      for (const std::string& text : reports.by_rank) {
        EXPECT_THAT(text, HasSubstr(kDifferent + backward + ", after a b; rank 1: " + backward + ", after b a"))
            << backend;
      }
    }
}

/// After apply_requires_grad() the execution order is recorded anew; ranks usually differ from its beginning.
TEST(ExecutionOrder, MismatchAfterApplyRequiresGradIsReportedBeforeBackward) {
  for (const bool swaps : {true, false}) {
    const Reports reports =
        run_two_branches({.strategy = "fsdp", .swaps = swaps, .from = 2, .applies_requires_grad = true});
    EXPECT_EQ(reports.steps, swaps ? 2 : 4);  // the control: ranks with equal orders
    for (const std::string& text : reports.by_rank)
      EXPECT_THAT(text, swaps ? testing::Matcher<std::string>(HasSubstr(kDifferent + std::string("the first backward")))
                              : testing::Matcher<std::string>(""));
  }
}

/// The errors of two ranks whose engines are made with these products; "" for none.
std::vector<std::string> errors_with_products(nn::Products first, nn::Products second, const std::string& backend) {
  std::vector<std::string> errors(2);
  comm::InitOptions config;
  config.backend = backend;
  config.timeout = std::chrono::seconds(10);
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    nn::Context context({.products = world.rank() == 0 ? first : second});
    TwoBranches model(context);
    EngineOptions options = engine_for("fsdp");
    options.wrap = "a;b";
    try {
      Engine engine(model, world, options);
    } catch (const base::Error& error) {
      errors[static_cast<std::size_t>(world.rank())] = std::string(error.kind()) + ": " + error.what();
    }
  });
  return errors;
}

TEST(EngineSettings, DifferentProductsAreOneErrorOnAllRanks) {
  for (const char* backend : {"shm", "tcp"}) {
    for (const std::string& error : errors_with_products(nn::Products::own, nn::Products::library, backend))
      EXPECT_EQ(error,
                "Mismatch: engine: TESSERA_PRODUCTS differs between the ranks: it is library on rank 1; own on rank 0; "
                "choose the same on all ranks");
    for (const std::string& error : errors_with_products(nn::Products::own, nn::Products::own, backend))
      EXPECT_EQ(error, "");
  }
}

/// The errors of two ranks whose engines have these options; "" for none.
std::vector<std::string> errors_with_options(const EngineOptions& first, const EngineOptions& second) {
  std::vector<std::string> errors(2);
  comm::InitOptions config;
  config.timeout = std::chrono::seconds(10);
  comm::run_threads(2, config, [&](comm::Communicator& world) {
    nn::Context context;
    TwoBranches model(context);
    try {
      Engine engine(model, world, world.rank() == 0 ? first : second);
    } catch (const base::Error& error) {
      errors[static_cast<std::size_t>(world.rank())] = std::string(error.kind()) + ": " + error.what();
    }
  });
  return errors;
}

TEST(EngineSettings, DifferentOptionsAreOneErrorOnAllRanks) {
  EngineOptions usual = engine_for("fsdp");
  usual.wrap = "a;b";
  const auto expect = [&](const char* name, const EngineOptions& other) {
    const std::vector<std::string> errors = errors_with_options(usual, other);
    EXPECT_THAT(errors[0],
                testing::StartsWith(std::string("Mismatch: engine: ") + name + " differs between the ranks: it is "));
    EXPECT_EQ(errors[1], errors[0]);
  };
  EngineOptions other = usual;
  other.strategy = strategy_named("ddp");
  expect("strategy", other);
  other = usual;
  other.wrap = "none";
  expect("units", other);
  other = usual;
  other.prefetch = 2;
  expect("prefetch", other);
  other = usual;
  other.optimizer.beta2 = 0.95;
  expect("optimizer", other);
  other = usual;
  other.clip_norm = 1;
  expect("clip_norm", other);
  other = usual;
  other.mesh = MeshShape::grid(2, 1);
  expect("mesh", other);
  other = usual;
  other.unit_strategy = [](const UnitSpec& unit) {
    return unit.name == "b" ? std::optional(strategy_named("zero2")) : std::nullopt;
  };
  expect("units", other);
  other = usual;
  other.prefetch_order.backward["b"] = {};
  expect("prefetch_order.backward", other);
  for (const std::string& error : errors_with_options(usual, usual)) EXPECT_EQ(error, "");  // the control
}

TEST(ExecutionOrder, LaterMismatchIsReportedAtNextStep) {
  for (const char* backend : {"shm", "tcp"})
    for (const char* strategy : {"ddp", "zero1", "zero2"}) {
      const Reports reports = run_two_branches({.strategy = strategy, .backend = backend, .swaps = true});
      EXPECT_LT(reports.steps, 4) << strategy;
      EXPECT_LT(reports.seconds, 2) << strategy;
      for (const std::string& text : reports.by_rank) {
        EXPECT_THAT(text, HasSubstr(kDifferent + std::string("step 3, after"))) << backend << strategy;
      }
      // The control: with equal orders no rank reports an error.
      const Reports agreed = run_two_branches({.strategy = strategy, .backend = backend});
      EXPECT_EQ(agreed.steps, 4);
      EXPECT_THAT(agreed.by_rank, testing::Each(""));
    }
}

/// The first rank that sees the difference aborts, while others are still in the exchange.
TEST(ExecutionOrder, MismatchHasItsKindOnEveryRank) {
  constexpr int kRanks = 6;
  comm::InitOptions config;
  config.timeout = std::chrono::seconds(20);
  for (const char* backend : {"shm", "tcp"}) {
    config.backend = backend;
    for (int round = 0; round < 20; ++round)
      comm::run_threads(kRanks, config, [&](comm::Communicator& world) {
        nn::Context context({.threads = 1, .memory_tracker = world.memory_tracker(), .memory = {}, .make_stream = {}});
        ExecOrderValidator order(world, context.runtime());
        order.agree("both");
        try {
          order.agree(world.rank() % 2 == 0 ? "even" : "odd");
          ADD_FAILURE();
        } catch (const base::Error& error) {
          EXPECT_EQ(std::string(error.kind()) + ": " + error.what(),
                    "Mismatch: execution order: the ranks differ: rank 0: even; rank 1: odd; rank 2: even; rank 3: "
                    "odd; rank 4: even; rank 5: odd");
        }
      });
  }
}

/// Ranks whose communicator accepts device memory only.
TEST(ExecutionOrder, MismatchIsReportedOverDeviceMemory) {
  for (const bool swaps : {true, false}) {
    const Reports reports =
        run_two_branches({.strategy = "ddp", .swaps = swaps, .device = harness::make_guarded_device({})});
    EXPECT_EQ(reports.steps == 4, !swaps);
    for (const std::string& text : reports.by_rank)
      EXPECT_THAT(text, swaps ? testing::Matcher<std::string>(HasSubstr(kDifferent + std::string("step 3, after")))
                              : testing::Matcher<std::string>(""));
  }
}

/// A gather that another rank never calls does not complete; the timeout error names unit, operation and rank.
TEST(ExecutionOrder, HangingMismatchIsReportedAtDeadline) {
  for (const auto& how :
       {OrderMismatch{.strategy = "fsdp", .swaps = true}, OrderMismatch{.strategy = "fsdp", .skips = true},
        OrderMismatch{.strategy = "ddp", .skips = true},
        OrderMismatch{.strategy = "fsdp", .backend = "tcp", .skips = true}}) {
    const Reports reports = run_two_branches(how);
    EXPECT_LT(reports.seconds, 15);
    for (const std::string& text : reports.by_rank)
      EXPECT_THAT(text, testing::AnyOf(HasSubstr(kDifferent), HasSubstr("(a)"), HasSubstr("(b)"))) << how.strategy;
  }
}

/// Under strategies whose forward needs no other rank, one rank may repeat a forward.
TEST(ExecutionOrder, OneRankMayRepeatForward) {
  const auto run = [](bool again) {
    TrainingSpec spec = base_spec("ddp", 3);
    spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
      if (!again || rank != 1) return;
      const auto batch = harness::make_batch(model.context(), spec, step, rank);
      nn::Tape tape;
      const nn::TapeScope recording(model.context(), &tape);
      model.loss(batch.tokens, batch.targets);
      engine.abort_step();  // as after an exception during the step
    };
    return train(spec);
  };
  EXPECT_TRUE(same_bits(run(false), run(true)));
}

TEST(ExecutionOrder, CheckedModeReportsMismatchAtOnce) {
  for (const char* backend : {"shm", "tcp"})
    for (const bool skips : {false, true}) {
      const Reports reports =
          run_two_branches({.strategy = "fsdp", .backend = backend, .swaps = !skips, .skips = skips, .checked = true});
      EXPECT_LT(reports.seconds, 2);
      for (const std::string& text : reports.by_rank) {
        EXPECT_THAT(text, HasSubstr("Mismatch: ")) << backend;
        EXPECT_THAT(text, testing::AnyOf(HasSubstr("(a)"), HasSubstr("(b)"), HasSubstr(kDifferent))) << backend;
      }
    }
}

}  // namespace
}  // namespace tessera::fsdp
