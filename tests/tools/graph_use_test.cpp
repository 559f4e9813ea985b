// When the tool replays steps as device graphs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "tessera/base/error.h"
#include "tools/train/plan.h"

namespace tessera::tools {
namespace {

/// One rank on a GPU, whose step is the same work each time.
TrainPlan capturable() {
  TrainPlan plan;
  plan.options.device = "cuda";
  plan.model = nn::preset("gpt-nano");
  return plan;
}

TEST(GraphUse, IsDefaultWhereNothingIsKnownAgainstIt) {
  TrainPlan plan = capturable();
  EXPECT_EQ(graph_use_of(plan), GraphUse::if_possible);
  plan.options.graphs = true;
  EXPECT_EQ(graph_use_of(plan), GraphUse::required);
  plan.options.graphs = false;
  EXPECT_EQ(graph_use_of(plan), GraphUse::never);
}

/// CLI11 takes an optional<bool> for a count, which is 0 from the start.
TEST(GraphUse, OptionIsUnsetUntilItIsGiven) {
  for (const auto& [given, expected] :
       {std::pair<std::string, std::optional<bool>>{"", std::nullopt}, {"--graphs", true}, {"--no-graphs", false}}) {
    CLI::App command;
    TrainOptions options;
    add_train_options(command, options);
    command.parse(given);
    EXPECT_EQ(options.graphs, expected) << given;
  }
}

TEST(GraphUse, ObstacleMeansNoneByDefaultAndEndsWhatRequiresGraphs) {
  const std::pair<std::function<void(TrainPlan&)>, const char*> obstacles[] = {
      {[](TrainPlan& p) { p.options.device = "cpu"; }, "use --device cuda"},
      {[](TrainPlan& p) { p.ranks = 2; }, "use --ranks 1"},
      {[](TrainPlan& p) { p.model.attention_dropout = 0.1; }, "dropout"},
      {[](TrainPlan& p) { p.model.embedding_dropout = 0.1; }, "dropout"},
      {[](TrainPlan& p) { p.model.residual_dropout = 0.1; }, "dropout"},
      {[](TrainPlan& p) { p.options.accumulate = 2; }, "--accumulate"},
      {[](TrainPlan& p) { p.options.precision = "f16"; }, "use bf16"},
      {[](TrainPlan& p) { p.options.cpu_offload = true; }, "--cpu-offload"},
      {[](TrainPlan& p) { p.precision = {.compute = base::DType::bf16, .reduce = base::DType::f32}; },
       "--reduce-dtype"},
      {[](TrainPlan& p) { p.options.trace = "t.json"; }, "--trace"},
      {[](TrainPlan& p) { p.options.report = "r.html"; }, "--report"},
  };
  for (const auto& [add, reason] : obstacles) {
    TrainPlan plan = capturable();
    add(plan);
    EXPECT_THAT(graph_obstacle(plan), testing::HasSubstr(reason));
    EXPECT_EQ(graph_use_of(plan), GraphUse::never) << reason;
    plan.options.graphs = false;
    EXPECT_EQ(graph_use_of(plan), GraphUse::never) << reason;
    plan.options.graphs = true;
    try {
      graph_use_of(plan);
      ADD_FAILURE() << reason;
    } catch (const base::InvalidUsage& error) {
      EXPECT_THAT(error.what(), testing::AllOf(testing::StartsWith("--graphs: "), testing::HasSubstr(reason)));
    }
  }
}

}  // namespace
}  // namespace tessera::tools
