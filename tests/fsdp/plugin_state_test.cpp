// Plug-in state is saved in checkpoints: a resumed training equals an uninterrupted one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "tessera/fsdp/checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::train;
using harness::TrainingRecord;
using nn::test::TemporaryDirectory;
using testing::HasSubstr;

struct Case {
  const char* strategy;
  int ranks;
  const char* reduce_scatter;
  const char* all_reduce;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.strategy << " on " << c.ranks << " ranks"; }
};

TrainingSpec case_spec(const Case& c) {
  TrainingSpec spec = plugin_spec(c.strategy, c.ranks, {"plain", c.reduce_scatter, c.all_reduce});
  spec.steps = 5;
  spec.global_batch = 12;
  return spec;
}

struct Resumed {
  TrainingRecord record;
  std::string dropped;
};

Resumed resume(TrainingSpec spec, const std::string& directory, bool forget = false) {
  Resumed resumed;
  std::mutex mutex;
  spec.first_step = 2;
  spec.seed += 1;  // other initial values: all values must come from the checkpoint
  spec.before_training = [&](Engine& engine, comm::Communicator& control) {
    Checkpoint checkpoint(directory);
    const RestoreReport report = restore(engine, checkpoint);
    EXPECT_TRUE(checkpoint.verify().empty());
    if (forget) engine.state().load_plugin_state({});
    const std::lock_guard lock(mutex);
    if (control.rank() == 0) resumed.dropped = report.dropped;
  };
  resumed.record = train(spec);
  return resumed;
}

class PluginState : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Plugins, PluginState,
                         testing::Values(Case{"ddp", 2, "plain", "powersgd"}, Case{"ddp", 3, "plain", "int8_feedback"},
                                         Case{"fsdp", 2, "int8_feedback", "plain"},
                                         Case{"hsdp", 4, "int8_feedback", "int8_feedback"}),
                         [](const auto& test) {
                           return std::string(test.param.strategy) + "_" + test.param.reduce_scatter + "_" +
                                  test.param.all_reduce;
                         });

TEST_P(PluginState, ResumesFromCheckpoint) {
  const TemporaryDirectory directory;
  const TrainingSpec spec = case_spec(GetParam());
  const TrainingRecord whole = train(saving(spec, directory.path(), 1, /*asynchronous=*/true));
  const Resumed resumed = resume(spec, directory.path());
  EXPECT_EQ(resumed.dropped, "");
  EXPECT_EQ(resumed.record.parameters, whole.parameters);
  // Negative control: without plug-in state the bits differ.
  EXPECT_NE(resume(spec, directory.path(), true).record.parameters, whole.parameters);
}

TEST_P(PluginState, ReportsDroppedStateOfOtherWorldOrPlugin) {
  const TemporaryDirectory directory;
  train(saving(case_spec(GetParam()), directory.path(), 1, /*asynchronous=*/true));
  Case fewer = GetParam();
  fewer.ranks = fewer.ranks == 2 ? 4 : 2;
  EXPECT_THAT(resume(case_spec(fewer), directory.path()).dropped, HasSubstr("starts empty"));
  const Case plain{GetParam().strategy, GetParam().ranks, "plain", "plain"};
  EXPECT_THAT(resume(case_spec(plain), directory.path()).dropped, HasSubstr("starts empty"));
}

/// apply_requires_grad() rebuilds the layout of flat parameters, and plug-ins start with new state.
TEST_P(PluginState, ApplyRequiresGradResetsState) {
  std::mutex mutex;
  std::vector<Values> by_rank(static_cast<std::size_t>(GetParam().ranks));
  TrainingSpec spec = case_spec(GetParam());
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel& model) {
    if (step == 1) {
      for (const auto& parameter : model.parameters()) {
        nn::Tensor tensor = parameter->tensor();
        if (parameter->name().find("attn") != std::string::npos) tensor.set_requires_grad(false);
      }
      engine.apply_requires_grad();
      std::size_t plugin_state = 0, not_zero = 0;
      for (const CollectivePlugin::State& state : engine.state().plugin_state()) {
        if (state.name.find("error") == std::string::npos) continue;
        plugin_state += state.count;
        not_zero += static_cast<std::size_t>(
            std::count_if(state.data, state.data + state.count, [](float value) { return value != 0; }));
      }
      EXPECT_GT(plugin_state, 0U);
      EXPECT_EQ(not_zero, 0U);
    }
    if (step != 4) return;
    Values mine = values_of(engine);
    const std::lock_guard lock(mutex);
    by_rank[static_cast<std::size_t>(rank)] = std::move(mine);
  };
  const TrainingRecord record = train(spec);
  EXPECT_TRUE(std::isfinite(record.losses.back()));
  for (const auto& mine : by_rank) EXPECT_EQ(mine, by_rank[0]);
}

TEST(PluginState, StatelessPluginsDropNothing) {
  const TemporaryDirectory directory;
  train(saving(case_spec({"fsdp", 2, "plain", "plain"}), directory.path(), 1, /*asynchronous=*/true));
  EXPECT_EQ(resume(case_spec({"fsdp", 3, "int8", "plain"}), directory.path()).dropped, "");
}

}  // namespace
}  // namespace tessera::fsdp
