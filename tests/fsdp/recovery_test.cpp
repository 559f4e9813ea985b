// Exceptions in a step: after abort_step() the engine trains on with the bits of an undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "tessera/nn/activation_checkpoint.h"
#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using base::MemoryCategory;
using comm::OpKind;
using harness::make_batch;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;

INSTANTIATE_TEST_SUITE_P(Worlds, Acceptance, acceptance_worlds(), acceptance_name);

struct Thrown {};

/// A token outside the vocabulary: the embedding rejects it after the root was gathered and the first block's gather
/// was submitted.
void fail_in_embedding(const TrainingSpec& spec, int step, int rank, nn::CausalModel& model) {
  const auto batch = make_batch(model.context(), spec, step, rank);
  batch.tokens.data<std::int32_t>()[0] = 1 << 20;
  nn::Tape tape;
  const nn::TapeScope recording(model.context(), &tape);
  EXPECT_THROW(model.loss(batch.tokens, batch.targets), base::InvalidUsage);
}

/// Targets of another shape: the loss rejects them while the root's forward is open.
void fail_in_loss(const TrainingSpec& spec, int step, int rank, nn::CausalModel& model) {
  const auto batch = make_batch(model.context(), spec, step, rank);
  nn::Tape tape;
  const nn::TapeScope recording(model.context(), &tape);
  const nn::Tensor wrong = nn::Tensor::zeros(model.context(), {1, 1}, DType::i32);
  EXPECT_THROW(model.loss(batch.tokens, wrong), base::InvalidUsage);
}

/// Throws where backward begins, with the units that forward kept still unsharded.
void fail_in_backward(const TrainingSpec& spec, int step, int rank, nn::CausalModel& model) {
  const auto batch = make_batch(model.context(), spec, step, rank);
  nn::Tape tape;
  const nn::TapeScope recording(model.context(), &tape);
  const nn::Tensor loss = model.loss(batch.tokens, batch.targets);
  tape.record("throws", loss, [] { throw Thrown{}; });
  EXPECT_THROW(tape.backward(loss), Thrown);
}

/// Throws in backward after every unit was recomputed.
void fail_in_recompute(const TrainingSpec& spec, int step, int rank, nn::CausalModel& model) {
  nn::Context& context = model.context();
  const auto batch = make_batch(context, spec, step, rank);
  nn::Tape tape;
  nn::Tensor loss;
  int calls = 0;
  {
    const nn::TapeScope recording(context, &tape);
    loss = nn::run_checkpointed(context, [&] {
      const nn::Tensor result = model.loss(batch.tokens, batch.targets);
      if (++calls == 2) throw Thrown{};
      return result;
    });
  }
  EXPECT_THROW(tape.backward(loss), Thrown);
}

TEST_P(Acceptance, P13_EngineTrainsOnAfterException) {
  for (const std::string& name : strategies()) {
    TrainingSpec one = spec(name);
    const TrainingRecord undisturbed = train(one);
    one.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
      fail_in_backward(one, step, rank, model);
      engine.abort_step();
      EXPECT_EQ(engine.steps(), static_cast<std::uint64_t>(step) + 1) << name;
    };
    EXPECT_TRUE(same_bits(undisturbed, train(one))) << name;
  }
}

TEST(Recovery, TrainsOnAfterExceptionsInForwardAndBackward) {
  for (const char* name : {"ddp", "zero1", "fsdp"}) {
    const TrainingSpec spec = base_spec(name);
    const auto fail_before = [&](int step, int rank, Engine& engine) {
      auto& model = dynamic_cast<nn::CausalModel&>(nn_module(engine.model().root()));
      fail_in_embedding(spec, step, rank, model);
      engine.abort_step();
      fail_in_backward(spec, step, rank, model);
      engine.abort_step();
    };
    TrainingSpec disturbed = spec;
    disturbed.before_training = [&](Engine& engine, comm::Communicator& control) {
      fail_before(0, control.rank(), engine);
    };
    disturbed.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
      if (step + 1 < spec.steps) fail_before(step + 1, rank, engine);
    };
    const TrainingRecord expected = train(spec), record = train(disturbed);
    EXPECT_EQ(record.losses, expected.losses) << name;
    EXPECT_TRUE(same_bits(record, expected)) << name;
    for (const auto& memory_tracker : record.memory_trackers)
      EXPECT_EQ(memory_tracker.now_of(MemoryCategory::unsharded_gradient), 0U) << name;
  }
}

TEST(Recovery, TrainsOnAfterExceptionInRecompute) {
  for (const char* strategy : {"ddp", "zero1", "fsdp"}) {
    TrainingSpec spec = base_spec(strategy, 2, {.clip_norm = 0.5});
    spec.model.residual_dropout = spec.model.embedding_dropout = spec.model.attention_dropout = 0.1;
    const TrainingRecord expected = train(spec);
    EXPECT_FALSE(expected.parameters.empty());
    TrainingSpec disturbed = spec;
    disturbed.make_model = [config = spec.model](nn::Context& context) {
      auto model = nn::make_model(context, config);
      nn::checkpoint_activations(*model);
      return model;
    };
    disturbed.before_training = [&](Engine& engine, comm::Communicator& control) {
      fail_in_recompute(spec, 0, control.rank(), dynamic_cast<nn::CausalModel&>(nn_module(engine.model().root())));
      engine.abort_step();
    };
    const TrainingRecord record = train(disturbed);
    EXPECT_EQ(record.losses, expected.losses) << strategy;
    EXPECT_TRUE(same_bits(record, expected)) << strategy;  // including the norms of all gradients
    EXPECT_EQ(record.parameters, expected.parameters) << strategy;
  }
}

/// Throws in its third run on every rank, after it has sent data.
class Failing final : public CollectivePlugin {
 public:
  explicit Failing(std::unique_ptr<CollectivePlugin> inner, bool fails)
      : inner_(std::move(inner)), left_(fails ? 3 : 0) {}
  void prepare(const CollectiveSetup& setup) override { inner_->prepare(setup); }
  void clear_state(Stream& stream) override { inner_->clear_state(stream); }
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works = inner_->run(call);
    if (left_ > 0 && --left_ == 0) throw base::SystemError("planted");
    return works;
  }

 private:
  const std::unique_ptr<CollectivePlugin> inner_;
  int left_;
};

TEST(Recovery, TrainsOnAfterExceptionInPlugin) {
  for (const auto& [kind, strategy] : {std::pair(OpKind::all_reduce, "ddp"), std::pair(OpKind::all_gather, "fsdp"),
                                       std::pair(OpKind::reduce_scatter, "fsdp")})
    for (const char* name : {"int8", "int8_feedback", "powersgd"}) {
      const CollectiveRegistry known = CollectiveRegistry::built_in();
      if (!known.has(kind, name)) continue;
      const auto losses = [&, collective = kind](bool fails) {
        TrainingSpec spec = plugin_spec(strategy, 2, {});
        spec.engine.collectives.add(collective, "failing",
                                    [&] { return std::make_unique<Failing>(known.make(collective, name), fails); });
        (collective == OpKind::all_reduce   ? spec.engine.strategy.all_reduce
         : collective == OpKind::all_gather ? spec.engine.strategy.all_gather
                                            : spec.engine.strategy.reduce_scatter) = "failing";
        spec.retry_failed_steps = true;
        const TrainingRecord record = train(spec);
        EXPECT_EQ(record.failed_steps, fails ? 1 : 0) << name;
        return record.losses;
      };
      EXPECT_EQ(losses(true), losses(false)) << comm::name_of(kind) << " " << name;
    }
}

TEST(Recovery, TrainsOnAfterExceptionWithCpuOffload) {
  const auto run = [](bool disturb) {
    TrainingSpec spec = base_spec("fsdp", 2, {.layers = 2, .clip_norm = 0.5});
    spec.engine.poison = true;
    spec.engine.cpu_offload = true;
    spec.engine.offload_chunk_elements = 5001;  // several chunks per unit, at odd offsets
    spec.runtime = harness::make_guarded_device({.lazy = true});
    spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel& model) {
      if (!disturb) return;
      fail_in_loss(spec, 0, rank, model);
      engine.abort_step();
    };
    return train(spec);
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

/// abort_step() drops the gradients of a failed microbatch together with the step's earlier ones.
TEST(Recovery, AbortDropsEarlierMicrobatches) {
  for (const Accumulation accumulation : {Accumulation::every, Accumulation::last}) {
    TrainingSpec spec = base_spec("fsdp");
    spec.microbatches = 3;
    spec.global_batch = 3 * spec.ranks;
    spec.engine.strategy = with_accumulation(spec.engine.strategy, accumulation);
    spec.engine.measure_norm = true;
    const TrainingRecord undisturbed = train(spec);
    spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel& model) {
      engine.set_is_last_backward(false);
      const auto batch = make_batch(model.context(), spec, 0, rank);
      harness::forward_backward(model, batch);
      engine.abort_step();
    };
    EXPECT_TRUE(same_bits(undisturbed, train(spec)));
  }
}

TEST(Recovery, AbortEndsTraceRanges) {
  TrainingSpec spec = base_spec("fsdp", 2, {.layers = 2});
  spec.runtime = harness::make_guarded_device({.lazy = true});
  spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel& model) {
    const auto batch = make_batch(model.context(), spec, 0, rank);
    const nn::Tensor wrong = nn::Tensor::zeros(model.context(), {1, 1}, DType::i32);
    EXPECT_THROW(model.loss(batch.tokens, wrong), base::InvalidUsage);
    EXPECT_EQ(harness::drain_ranges().open, 1) << "the control: nothing has ended it";
    engine.abort_step();
    EXPECT_EQ(harness::drain_ranges().open, 0);
  };
  train(spec);
}

}  // namespace
}  // namespace tessera::fsdp
