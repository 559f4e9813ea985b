// Outputs that backward computes again, under the engine: the same bits with every strategy and division into units.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using base::MemoryCategory;
using harness::train;
using harness::TrainingRecord;

TrainingSpec recomputing(TrainingSpec spec) {
  spec.make_model = [config = spec.model](nn::Context& context) {
    context.set_recomputed({.activations = true, .norms = true});
    return nn::make_model(context, config);
  };
  return spec;
}

class RecomputedOutputs : public testing::TestWithParam<const char*> {};

TEST_P(RecomputedOutputs, BitsEqualRunThatKeepsThem) {
  for (const char* model : {"gpt-nano", "llama-nano"}) {
    for (const char* wrap :
         {"block", "none", "type:LayerNorm;type:RMSNorm;block", "type:Linear", "type:Linear;block"}) {
      TrainingSpec spec = base_spec(GetParam(), 4, {.clip_norm = 0.5});
      if (std::string(model) != "gpt-nano") spec.model = nn::preset(model);
      const bool gpt = spec.model.family == nn::ModelConfig::Family::gpt2;
      spec.engine.wrap = std::string(wrap).starts_with("type:LayerNorm")
                             ? (gpt ? "type:LayerNorm;block" : "type:RMSNorm;block")
                             : wrap;
      const TrainingRecord kept = train(spec);
      for (const bool lazy : {false, true}) {
        TrainingSpec with = recomputing(spec);
        with.lazy_streams = with.engine.poison = lazy;  // poison: a parameter without memory is not read
        const TrainingRecord record = train(with);
        EXPECT_EQ(record.losses, kept.losses) << spec.engine.wrap;
        EXPECT_TRUE(harness::same_bits(record, kept)) << spec.engine.wrap;
        EXPECT_FALSE(record.parameters.empty());
        if (lazy) continue;  // lazy streams keep the memory of work that has not run
        EXPECT_LT(record.memory_trackers[0].peak_of(MemoryCategory::activation),
                  kept.memory_trackers[0].peak_of(MemoryCategory::activation));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, RecomputedOutputs, testing::ValuesIn(kStrategies));

}  // namespace
}  // namespace tessera::fsdp
