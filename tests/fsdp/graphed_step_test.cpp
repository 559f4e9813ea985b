// Forward and backward as one device graph: bitwise equality, its own memory, and what can't be captured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp/graphed_step.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/graph_capture.h"
#include "tessera/nn/layers/linear.h"
#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"

namespace tessera::fsdp {
namespace {

using testing::HasSubstr;

struct Outcome {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> parameters;
  std::uint64_t copied = 0;  // bytes, by the engine
  int calls = 0;             // of forward and backward
  std::string obstacle;
  bool operator==(const Outcome& other) const {
    return losses == other.losses && norms == other.norms && parameters == other.parameters;
  }
};

TrainingSpec graph_spec(const char* strategy) {
  TrainingSpec spec = base_spec(strategy, 1, {.layers = 2, .clip_norm = 0.5});
  spec.steps = 6;
  spec.global_batch = 4;
  spec.engine.poison = true;
  spec.runtime = harness::make_guarded_device({.lazy = true});
  return spec;
}

/// One rank that trains from a batch at a fixed address.
class Alone {
 public:
  Alone(const TrainingSpec& spec, comm::Communicator& world)
      : spec_(spec),
        context_({.memory_tracker = world.memory_tracker(), .runtime = spec.runtime}),
        model_(spec.make_model ? spec.make_model(context_) : nn::make_model(context_, spec.model)),
        engine_((model_->set_dtype(spec.dtype), *model_), world, spec.engine),
        batch_(harness::make_batch(context_, spec, 0, 0)) {
    engine_.initialize(0);
  }

  nn::Tensor forward_backward() {
    ++outcome_.calls;
    nn::Tape tape;
    nn::Tensor loss;
    {
      const nn::TapeScope recording(context_, &tape);
      loss = model_->loss(batch_.tokens, batch_.targets);
    }
    tape.backward(loss);
    if (at_end_) at_end_(loss);
    return loss;
  }

  void next_batch(int step) {
    const harness::TokenBatch fresh = harness::make_batch(context_, spec_, step, 0);
    for (const auto& [from, to] : {std::pair(fresh.tokens, batch_.tokens), std::pair(fresh.targets, batch_.targets)})
      context_.runtime().copy(context_.stream(), base::CopyDirection::device_to_device, to.raw(), from.raw(),
                              to.bytes());
  }

  Outcome train(bool graphs) {
    std::optional<GraphedStep> graphed;
    if (graphs) graphed.emplace(engine_, uncapturable_);
    for (int step = 0; step < spec_.steps; ++step) {
      next_batch(step);
      const nn::Tensor loss = graphed ? graphed->run([&] { return forward_backward(); }) : forward_backward();
      engine_.step(learning_rate_ ? learning_rate_(step) : spec_.lr);
      outcome_.losses.push_back(loss.item());
      outcome_.norms.push_back(engine_.grad_norm());
      if (between_) between_(*this, step);
    }
    engine_.state().for_each_parameter([&](const fsdp::Parameter& p, std::span<const float> values) {
      outcome_.parameters[p.name()].assign(values.begin(), values.end());
    });
    outcome_.copied = engine_.stats().copied_bytes();
    if (graphed) {
      outcome_.obstacle = graphed->obstacle();
      EXPECT_EQ(graphed->replays(), outcome_.obstacle.empty());
    }
    return outcome_;
  }

  const TrainingSpec& spec_;
  nn::Context context_;
  std::unique_ptr<nn::CausalModel> model_;
  Engine engine_;
  harness::TokenBatch batch_;
  Outcome outcome_;
  std::function<double(int step)> learning_rate_;            // empty: that of the spec
  std::function<void(Alone& rank, int step)> between_ = {};  // after each step
  std::function<void(const nn::Tensor& loss)> at_end_ = {};  // of forward and backward
  Uncapturable uncapturable_ = Uncapturable::error;
};

void alone(const TrainingSpec& spec, const std::function<void(Alone&)>& body) {
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(60);
  comm::run_threads(spec.ranks, config, [&](comm::Communicator& world) {
    Alone rank(spec, world);
    body(rank);
  });
}

Outcome train(const TrainingSpec& spec, bool graphs) {
  Outcome outcome;
  alone(spec, [&](Alone& rank) { outcome = rank.train(graphs); });
  return outcome;
}

TEST(GraphedStep, IsBitwiseEqual) {
  for (const char* strategy : {"ddp", "zero2", "fsdp"}) {
    const TrainingSpec spec = graph_spec(strategy);
    const Outcome plain = train(spec, false), graphed = train(spec, true);
    EXPECT_EQ(graphed, plain) << strategy;
    EXPECT_NE(plain.losses.front(), plain.losses.back());
    EXPECT_EQ(plain.calls, spec.steps);
    EXPECT_EQ(graphed.calls, 2) << "once to warm up, once to record";
    EXPECT_EQ(graphed.copied, plain.copied);
  }
}

/// A training in which `prepare` has set what happens.
Outcome train_with(const std::function<void(Alone&)>& prepare, bool graphs,
                   const TrainingSpec& spec = graph_spec("fsdp")) {
  Outcome outcome;
  alone(spec, [&](Alone& rank) {
    prepare(rank);
    outcome = rank.train(graphs);
  });
  return outcome;
}

TEST(GraphedStep, LearningRateIsNotPartOfGraph) {
  const auto rising = [](Alone& rank) { rank.learning_rate_ = [](int step) { return 1e-3 * (1 + step); }; };
  const auto constant = [](Alone& rank) { rank.learning_rate_ = [](int) { return 1e-3; }; };
  EXPECT_EQ(train_with(rising, true), train_with(rising, false));
  // The control: had the graph kept the first rate, it would end like this.
  EXPECT_FALSE(train_with(rising, true) == train_with(constant, false));
}

/// A forward of another shape, such as an evaluation's last batch, in the memory that the next replay leaves alone.
TEST(GraphedStep, EvaluationsOfOtherShapesBetweenReplaysChangeNothing) {
  std::vector<double> evaluated[2];
  for (const bool graphs : {false, true}) {
    const auto evaluate = [&](Alone& rank) {
      rank.between_ = [&](Alone& r, int step) {
        TrainingSpec other = r.spec_;
        other.global_batch = 1 + step % 3;
        const harness::TokenBatch batch = harness::make_batch(r.context_, other, step, 0);
        const nn::EvaluationScope evaluation(r.context_);
        evaluated[graphs ? 1 : 0].push_back(r.model_->loss(batch.tokens, batch.targets).item());
      };
    };
    EXPECT_EQ(train_with(evaluate, graphs), train_with([](Alone&) {}, graphs));
  }
  EXPECT_EQ(evaluated[0], evaluated[1]);
  EXPECT_NE(evaluated[1].front(), evaluated[1].back()) << "the control: they depend on the parameters";
}

/// As a checkpoint that is loaded into a training whose steps are replayed.
TEST(GraphedStep, ReplaysUseValuesLoadedInBetween) {
  const auto loads_at = [](int at) {
    return [at](Alone& rank) {
      rank.between_ = [at](Alone& r, int step) {
        if (step != at) return;
        r.engine_.state().load([](const fsdp::Parameter& p, nn::ElementRange range, float* out) {
          for (std::int64_t i = range.begin; i < range.end; ++i)
            out[i - range.begin] = p.name().find("weight") != std::string::npos ? 0.02F * static_cast<float>(i % 7) : 0;
        });
      };
    };
  };
  EXPECT_EQ(train_with(loads_at(3), true), train_with(loads_at(3), false));
  EXPECT_FALSE(train_with(loads_at(3), true) == train_with(loads_at(-1), true)) << "the control: without the load";
}

TEST(GraphedStep, SupportsModelsAndDtypes) {
  for (const char* model : {"gpt-nano", "llama-nano"})
    for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
      TrainingSpec spec = graph_spec("ddp");
      spec.model = nn::preset(model);
      spec.dtype = dtype;
      EXPECT_EQ(train(spec, true), train(spec, false)) << model;
    }
}

/// The histories of the scales are on the device, with their position.
TEST(GraphedStep, DelayedScalesAdvanceInReplays) {
  TrainingSpec spec = graph_spec("fsdp");
  spec.model = nn::preset("gpt-nano");
  spec.dtype = base::DType::bf16;
  spec.steps = static_cast<int>(nn::kFp8History) + 2;
  std::vector<Outcome> ends;
  for (const nn::Fp8Scaling scaling : {nn::Fp8Scaling::delayed, nn::Fp8Scaling::current}) {
    spec.make_model = [config = spec.model, scaling](nn::Context& context) {
      auto model = nn::make_model(context, config);
      model->set_dtype(base::DType::bf16);
      EXPECT_GT(nn::use_fp8(*model, scaling), 0);
      return model;
    };
    ends.push_back(train(spec, false));
    EXPECT_EQ(train(spec, true), ends.back());
  }
  EXPECT_FALSE(ends[0] == ends[1]) << "the control: the scales differ";
}

TEST(GraphedStep, RecomputesCheckpointedModules) {
  TrainingSpec spec = graph_spec("fsdp");
  const Outcome plain = train(spec, false);
  spec.make_model = [config = spec.model](nn::Context& context) {
    auto model = nn::make_model(context, config);
    nn::checkpoint_activations(*model);
    return model;
  };
  EXPECT_EQ(train(spec, true), plain);
}

/// Captures 1 + 2 in memory of the pool, lets other tensors use the pool's free memory, and replays.
float sum_after_others(bool own_memory) {
  nn::Context context({.runtime = harness::make_guarded_device({.lazy = true})});
  const auto value = [&](float number) {
    nn::Tensor tensor = nn::Tensor::empty(context, {4}, base::DType::f32);
    context.kernels<float>("fill").fill(context.stream(), number, tensor.data<float>(), 4);
    return tensor;
  };
  const nn::Tensor result = value(0);
  const auto memory = context.memory().make_keeping();
  std::optional<nn::GraphCapture> capture;
  capture.emplace(context, own_memory ? *memory : context.memory());
  {
    const nn::Tensor one = value(1), two = value(2);
    context.kernels<float>("add").add(context.stream(),
                                      {one.data<float>(), two.data<float>(), result.data<float>(), 4});
  }
  const auto graph = capture->finish();
  capture.reset();
  const nn::Tensor other = value(5), another = value(7);  // live during the replay
  graph->launch(context.stream());
  const nn::Tensor scalar = nn::Tensor::empty(context, {1}, base::DType::f32);
  context.kernels<float>("add").add(context.stream(),
                                    {other.data<float>(), another.data<float>(), scalar.data<float>(), 1});
  return static_cast<float>(scalar.item());
}

TEST(GraphedStep, MemoryOfGraphIsNotReused) {
  EXPECT_EQ(sum_after_others(true), 12.0F);
  EXPECT_EQ(sum_after_others(false), 3.0F) << "the control: the replay writes where others are";
}

TEST(GraphedStep, HostNeverWaitsAndEventsAreOfFirstStep) {
  alone(graph_spec("ddp"), [](Alone& rank) {
    GraphedStep graphed(rank.engine_);
    harness::HostWaits last;
    for (int step = 0; step < 6; ++step) {
      const harness::HostWaits before = harness::host_waits();
      rank.next_batch(step);
      const nn::Tensor loss = graphed.run([&] { return rank.forward_backward(); });
      rank.engine_.step(1e-2);
      last = harness::host_waits() - before;
      EXPECT_GT(loss.item(), 0.0);
    }
    EXPECT_EQ(last, harness::HostWaits{});
    std::map<base::TraceEventKind, int> events;
    for (const base::TraceEvent& event : rank.engine_.trace().drain()) events[event.kind] += event.unit == "root";
    EXPECT_EQ(events[base::TraceEventKind::forward], 1);
    EXPECT_EQ(events[base::TraceEventKind::backward], 1);
    EXPECT_EQ(events[base::TraceEventKind::optimizer_step], 6);
  });
}

std::string refusal(const std::function<void()>& what) {
  try {
    what();
  } catch (const base::Error& error) {
    return error.what();
  }
  return "done";
}

TEST(GraphedStep, ErrorsStateReason) {
  TrainingSpec spec = graph_spec("fsdp");
  spec.ranks = 2;
  spec.runtime = nullptr;
  EXPECT_THAT(refusal([&] { train(spec, true); }), HasSubstr("2 ranks synchronize streams"));
  spec.ranks = 1;
  EXPECT_THAT(refusal([&] { train(spec, true); }), HasSubstr("graph capture: device cpu does not support it"));
  spec = graph_spec("fsdp");
  spec.engine.cpu_offload = true;
  EXPECT_THAT(refusal([&] { train(spec, true); }), HasSubstr("cpu offload copies parameters on another stream"));
  spec = graph_spec("fsdp");
  spec.dtype = base::DType::bf16;
  spec.engine.reduce_dtype = base::DType::f32;
  EXPECT_THAT(refusal([&] { train(spec, true); }), HasSubstr("reduce them in the dtype of the parameters"));
  spec = graph_spec("ddp");
  spec.model.residual_dropout = 0.1;
  EXPECT_THAT(refusal([&] { train(spec, true); }), HasSubstr("dropout can't be part of a graph"));
}

TEST(GraphedStep, StepsWithoutGraphRunWhereAsked) {
  const auto falls_back = [](Alone& rank) { rank.uncapturable_ = Uncapturable::runs_step; };
  const auto expect = [&](const TrainingSpec& spec, const auto& prepare, int calls, const char* obstacle) {
    const Outcome graphed = train_with(prepare, true, spec);
    EXPECT_EQ(graphed, train_with(prepare, false, spec)) << obstacle;
    EXPECT_EQ(graphed.calls, calls) << obstacle;
    EXPECT_THAT(graphed.obstacle, HasSubstr(obstacle));
  };
  for (const char* strategy : {"ddp", "fsdp"}) {
    TrainingSpec spec = graph_spec(strategy);
    const auto downloads = [&](Alone& rank) {  // when the gradients are complete
      falls_back(rank);
      rank.at_end_ = [](const nn::Tensor& loss) { EXPECT_GT(loss.item(), 0); };
    };
    expect(spec, downloads, spec.steps + 1, "a download can't be part of a graph");
    spec.model.residual_dropout = 0.1;
    expect(spec, falls_back, spec.steps + 1, "dropout can't be part of a graph");
  }
  TrainingSpec spec = graph_spec("fsdp");
  spec.engine.cpu_offload = true;
  expect(spec, falls_back, spec.steps, "cpu offload copies parameters");
  // The control: what can be captured is.
  EXPECT_EQ(train_with(falls_back, true).calls, 2);
}

TEST(GraphedStep, FailedCaptureRestoresContext) {
  nn::Context context({.runtime = harness::make_guarded_device({.lazy = true})});
  const auto memory = context.memory().make_keeping();
  const nn::Tensor tensor = nn::Tensor::zeros(context, {1}, base::DType::f32);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(refusal([&] {
                  const nn::GraphCapture capture(context, *memory);
                  tensor.item();
                }),
                HasSubstr("a download can't be part of a graph"));
    EXPECT_THAT(refusal([&] {
                  const nn::GraphCapture capture(context, *memory);
                  nn::Tensor::empty(context, {1}, base::DType::f32);
                  context.stream().record();
                }),
                HasSubstr("can't be recorded"));
    EXPECT_EQ(tensor.item(), 0.0);
  }
}

}  // namespace
}  // namespace tessera::fsdp
