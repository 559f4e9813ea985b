// Activation checkpointing under the engine: bits, gathers and bytes equal those of a run without it, in less memory.
#include "tessera/nn/activation_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/nn/models/gpt2.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using base::TraceEventKind;
using harness::train;
using harness::TrainingRecord;
using testing::ElementsAre;

using Which = std::function<bool(const nn::Module&)>;

TrainingSpec dropout_spec(const std::string& strategy, int ranks) {
  TrainingSpec spec = base_spec(strategy, ranks, {.clip_norm = 0.5});
  spec.model.residual_dropout = spec.model.embedding_dropout = spec.model.attention_dropout = 0.1;
  return spec;
}

/// The same spec with activation checkpointing of the selected modules; by default of the blocks.
TrainingSpec checkpointed(TrainingSpec spec, const Which& which = {}) {
  spec.make_model = [config = spec.model, which](nn::Context& context) {
    auto model = nn::make_model(context, config);
    nn::checkpoint_activations(*model, which);
    return model;
  };
  return spec;
}

void expect_same_bits(const TrainingRecord& a, const TrainingRecord& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_TRUE(harness::same_bits(a, b)) << what;  // including the norms of all gradients
  EXPECT_EQ(a.parameters, b.parameters) << what;
  EXPECT_FALSE(a.parameters.empty());
}

void expect_same_traffic(const TrainingRecord& a, const TrainingRecord& b, const std::string& what) {
  for (std::size_t rank = 0; rank < a.later_by_rank.size(); ++rank) {
    EXPECT_EQ(a.later_by_rank[rank].all_gather, b.later_by_rank[rank].all_gather) << what;
    EXPECT_EQ(a.later_by_rank[rank].reduce_scatter, b.later_by_rank[rank].reduce_scatter) << what;
    EXPECT_EQ(a.later_by_rank[rank].all_reduce, b.later_by_rank[rank].all_reduce) << what;
  }
}

std::uint64_t activation_peak(const TrainingRecord& record) {
  return record.memory_trackers.at(0).peak_of(MemoryCategory::activation);
}

class ActivationCheckpointing : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(ActivationCheckpointing, BitsAndTrafficEqualRunWithout) {
  const auto& [strategy, ranks] = GetParam();
  for (const char* model : {"gpt-nano", "llama-nano"}) {
    for (const base::DType dtype : {base::DType::f32, base::DType::bf16}) {
      TrainingSpec spec = dropout_spec(strategy, ranks);
      if (spec.engine.strategy.two_axes && ranks == 3) spec.engine.mesh = parse_mesh("1x3");
      if (std::string(model) != "gpt-nano") spec.model = nn::preset(model);
      spec.dtype = dtype;
      const TrainingRecord plain = train(spec);
      for (const bool lazy : {false, true}) {
        TrainingSpec with = checkpointed(spec);
        with.lazy_streams = with.engine.poison = lazy;
        const TrainingRecord record = train(with);
        expect_same_bits(record, plain, model);
        expect_same_traffic(record, plain, model);
        EXPECT_EQ(record.model_state, plain.model_state);
        EXPECT_EQ(record.copied_bytes, 0U);
        if (lazy) continue;  // lazy streams keep the memory of work that has not run
        EXPECT_LT(activation_peak(record), activation_peak(plain));
        EXPECT_EQ(record.memory_trackers[0].peak_of(MemoryCategory::unsharded_parameter),
                  plain.memory_trackers[0].peak_of(MemoryCategory::unsharded_parameter));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, ActivationCheckpointing,
                         testing::Combine(testing::Values("ddp", "zero1", "zero2", "fsdp", "hsdp", "shard_grad_op"),
                                          testing::Values(1, 2, 3, 4)),
                         [](const auto& given) {
                           return std::string(std::get<0>(given.param)) + "_" +
                                  std::to_string(std::get<1>(given.param));
                         });

// --- units inside and around checkpointed modules

/// Gathers per step of `with` minus those of `without`, in calls.
std::int64_t further_gathers(const TrainingSpec& with, const TrainingSpec& without, const std::string& what) {
  const TrainingRecord a = train(with), b = train(without);
  expect_same_bits(a, b, what);
  EXPECT_EQ(a.all_later.reduce_scatter, b.all_later.reduce_scatter) << what;
  const auto calls = [&](const TrainingRecord& r) {
    return static_cast<std::int64_t>(r.all_later.all_gather.calls) / (with.steps - with.first_step - 1);
  };
  for (const auto& memory_tracker : a.memory_trackers)
    EXPECT_EQ(memory_tracker.now_of(MemoryCategory::unsharded_gradient), 0U) << what;
  return calls(a) - calls(b);
}

TEST(CheckpointedUnits, UnitsInsideRegionsGatherOnceMoreExceptLast) {
  const Which blocks, root = [](const nn::Module&m) { return m.path().empty(); };
  const Which mlps = [](const nn::Module& m) { return m.path().ends_with(".mlp"); };
  const Which all = [](const nn::Module&) { return true; };
  struct Case {
    const char* wrap;
    Which which;
    std::int64_t more;
  };
  // The root and the last unit in forward order stay unsharded after forward, so they are never gathered again.
  for (const Case& c : {Case{"block", blocks, 0}, Case{"block", mlps, 0}, Case{"none", blocks, 0}, Case{"none", all, 0},
                        Case{"h.0.attn;h.0.mlp;h.1.attn;h.1.mlp", blocks, 2},  // attn of h.0 and of h.1
                        Case{"block;h.0.attn", blocks, 0},                     // h.0 stays unsharded around it
                        Case{"block", root, 2},                                // h.0 and h.1; h.2 stays unsharded
                        Case{"block;h.1.mlp", root, 3},                        // h.0, h.1 and h.1.mlp
                        Case{"h.0;h.1+ln_f", root, 1}}) {
    for (const int prefetch : {0, 1, 3}) {
      TrainingSpec spec = dropout_spec("fsdp", 2);
      spec.engine.wrap = c.wrap;
      spec.engine.prefetch = prefetch;
      spec.engine.poison = true;
      EXPECT_EQ(further_gathers(checkpointed(spec, c.which), spec, c.wrap), c.more)
          << c.wrap << " prefetch " << prefetch;
    }
  }
}

/// A unit gathers in two stages, over groups and inside one. Only the second stage is repeated: the secondary shard
/// stays until backward, also when the unit is recomputed.
TEST(CheckpointedUnits, RecomputeGathersFromSecondaryShards) {
  TrainingSpec spec = dropout_spec("fsdp", 4);
  spec.engine.reshard_group_size = 2;
  spec.engine.poison = true;
  EXPECT_EQ(further_gathers(checkpointed(spec), spec, "blocks"), 0);
  EXPECT_EQ(further_gathers(checkpointed(spec, [](const nn::Module& m) { return m.path().empty(); }), spec, "root"), 2);
}

enum class Kind : std::uint8_t {
  plain,
  checkpointed,
  with_other_masks  ///< recomputes with other dropout masks than forward
};

/// A model with checkpointed regions of its own: two blocks in one, a block used twice, and a tied head in another.
class Regions : public nn::CausalModel {
 public:
  Regions(nn::Context& context, const nn::ModelConfig& config, Kind kind)
      : CausalModel(context, config),
        kind_(kind),
        wte_(add<nn::Embedding>("wte", nn::EmbeddingOptions{config.vocabulary, config.width})),
        norm_(add<nn::LayerNorm>("norm", nn::NormOptions{config.width})),
        lm_head_(add<nn::LmHead>("lm_head", wte_, true, 0.02)) {
    for (int i = 0; i < 4; ++i) blocks_.push_back(&add<nn::Gpt2Block>("h." + std::to_string(i), config));
    blocks_[1]->checkpoint_activations(kind != Kind::plain);  // inside a region: computed three times
  }

 private:
  template <class Function>
  nn::Tensor region(Function function, const nn::Tensor& x) {
    if (kind_ == Kind::plain) return function(x);
    if (kind_ == Kind::checkpointed) return nn::checkpoint(context(), std::move(function), x);
    return nn::run_checkpointed(context(), [this, function, x, calls = std::make_shared<std::int64_t>(0)] {
      context().random().first_sample = (*calls)++;
      return function(x);
    });
  }
  nn::Tensor hidden(const nn::Tensor& tokens) override {
    nn::Tensor x = wte_(tokens);
    x = region([this](const nn::Tensor& t) { return (*blocks_[1])((*blocks_[0])(t)); }, x);
    x = (*blocks_[2])(x);
    x = region([this](const nn::Tensor& t) { return (*blocks_[0])((*blocks_[3])((*blocks_[0])(t))); }, x);
    return x;
  }
  nn::Tensor logits(const nn::Tensor& hidden) override {
    return region([this](const nn::Tensor& t) { return lm_head_(norm_(t)); }, hidden);
  }

  const Kind kind_;
  nn::Embedding& wte_;
  nn::LayerNorm& norm_;
  nn::LmHead& lm_head_;
  std::vector<nn::Gpt2Block*> blocks_;
};

TrainingSpec regions(const char* strategy, Kind kind) {
  TrainingSpec spec = dropout_spec(strategy, 2);
  spec.engine.poison = true;
  spec.make_model = [config = spec.model, kind](nn::Context& context) {
    return std::make_unique<Regions>(context, config, kind);
  };
  return spec;
}

TEST(CheckpointedUnits, SupportReusedAndTiedModules) {
  for (const char* strategy : {"ddp", "zero2", "shard_grad_op"})
    EXPECT_EQ(further_gathers(regions(strategy, Kind::checkpointed), regions(strategy, Kind::plain), strategy), 0)
        << strategy;
  for (const int prefetch : {0, 1, 2}) {
    TrainingSpec with = regions("fsdp", Kind::checkpointed), without = regions("fsdp", Kind::plain);
    with.engine.prefetch = without.engine.prefetch = prefetch;
    with.lazy_streams = prefetch == 1;
    // h.0 in either region. Prefetches of units that are used again differ, so they are not counted.
    const std::int64_t more = further_gathers(with, without, "fsdp");
    EXPECT_EQ(prefetch == 0 ? more : 2, 2);
  }
}

/// Negative control of all bitwise comparisons.
TEST(CheckpointedUnits, DetectsDifferentDropoutMasks) {
  EXPECT_NE(train(regions("fsdp", Kind::with_other_masks)).norms, train(regions("fsdp", Kind::plain)).norms);
}

TEST(CheckpointedUnits, TraceRecomputeAsForwardInsideBackward) {
  const auto order = [](const TrainingSpec& spec) {
    const auto names = event_names(train(spec).last_events, {TraceEventKind::unshard_issue, TraceEventKind::forward,
                                                             TraceEventKind::backward, TraceEventKind::reshard});
    return std::vector(std::find(names.begin(), names.end(), "backward root"), names.end());
  };
  const TrainingSpec spec = dropout_spec("fsdp", 2);
  EXPECT_THAT(order(checkpointed(spec)),
              ElementsAre("backward root", "unshard_issue h.1", "backward h.2", "forward h.2", "reshard h.2",  //
                          "unshard_issue h.0", "backward h.1", "forward h.1", "reshard h.1",                   //
                          "backward h.0", "forward h.0", "reshard h.0", "reshard root"));
  const auto all = order(checkpointed(spec, [](const nn::Module& m) { return m.path().empty(); }));
  EXPECT_THAT(all, ElementsAre("backward root", "unshard_issue h.0", "forward root", "unshard_issue h.1", "forward h.0",
                               "reshard h.0", "forward h.1", "reshard h.1", "forward h.2", "unshard_issue h.1",
                               "backward h.2", "reshard h.2", "unshard_issue h.0", "backward h.1", "reshard h.1",
                               "backward h.0", "reshard h.0", "reshard root"));
}

// --- memory

/// Bytes of a block's input on one rank.
std::uint64_t block_input(const TrainingSpec& spec) {
  return static_cast<std::uint64_t>(spec.global_batch / spec.ranks * spec.seq_len) *
         static_cast<std::uint64_t>(spec.model.width) * base::size_of(spec.dtype);
}

TEST(CheckpointedMemory, EqualsOneBlockAndInputsOfOthers) {
  for (const char* strategy : {"ddp", "fsdp"}) {
    for (const char* model : {"gpt-nano", "llama-nano"}) {
      TrainingSpec spec = dropout_spec(strategy, 2);
      spec.lazy_streams = false;  // a host that runs ahead keeps more memory live
      spec.model = nn::preset(model);
      spec.seq_len = 32;
      spec.model.layers = 1;
      const std::uint64_t one = activation_peak(train(spec));
      for (const int layers : {2, 6}) {
        spec.model.layers = layers;
        const std::uint64_t bound = one + static_cast<std::uint64_t>(layers - 1) * block_input(spec);
        EXPECT_LE(activation_peak(train(checkpointed(spec))), bound) << model << " " << layers;
        EXPECT_GT(activation_peak(train(spec)), bound) << "the control";
      }
    }
  }
}

// --- devices

TEST(CheckpointedDevices, HostNeitherAccessesNorWaits) {
  for (const int ranks : {1, 2}) {
    TrainingSpec spec = checkpointed(dropout_spec("fsdp", ranks));
    spec.steps = 4;
    spec.engine.poison = true;
    const TrainingRecord host = train(spec);
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord guarded = train(spec);
    expect_same_bits(guarded, host, "guarded");
    for (const auto& steps : guarded.waits)
      for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
  }
}

}  // namespace
}  // namespace tessera::fsdp
