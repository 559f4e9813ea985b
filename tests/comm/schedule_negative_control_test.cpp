// Negative controls: the schedule tests detect broken schedules.
#include <gmock/gmock.h>

#include "tests/comm/schedule_support.h"

namespace tessera::comm_test {
namespace {

using Reduce = ReduceOp::Kind;
using ::testing::HasSubstr;

ScheduleWorld world_of(OpKind kind, const std::string& name, int ranks, std::uint32_t in_place = 0) {
  const CollectiveSpec spec{
      .kind = kind, .ranks = ranks, .count = static_cast<std::size_t>(ranks) * 20, .ordered = false};
  return ScheduleWorld(spec, name, in_place);
}

/// Whether the dependency carries data from a step to one that reads it: then no other dependency can replace it.
bool moves_data(const Schedule& schedule, const ScheduleStep& earlier, const ScheduleStep& later) {
  if (earlier.to.bytes == 0) return false;
  const auto overlaps = [&](const BufferRegion& region) {
    return region.place == earlier.to.place && region.offset < earlier.to.offset + earlier.to.bytes &&
           earlier.to.offset < region.offset + region.bytes;
  };
  bool reads = overlaps(later.from) || overlaps(later.factors);
  for (std::uint32_t s = 0; s < later.sources; ++s) reads = reads || overlaps(schedule.sources[later.first_source + s]);
  return reads;
}

TEST(ScheduleNegativeControl, DetectsDroppedDependency) {
  int dropped = 0;
  for (const Named& algorithm : algorithms(false))
    for (const int ranks : {3, 4, 5}) {
      ScheduleWorld world = world_of(algorithm.kind, algorithm.name, ranks);
      ASSERT_EQ(world.race(), "");
      const Schedule whole = world.schedules[1];
      std::size_t which = 0;
      for (const ScheduleStep& step : whole.steps)
        for (std::uint32_t f = 0; f < step.dependents; ++f, ++which) {
          if (!moves_data(whole, step, whole.steps[whole.dependents[step.first_dependent + f]])) continue;
          world.schedules[1] = whole;
          drop_dependency(world.schedules[1], which);
          EXPECT_NE(world.race(), "") << describe(world.specs[1], algorithm.name) << " dependency " << which;
          ++dropped;
        }
    }
  EXPECT_GT(dropped, 100);
}

/// The runner detects it too: some order of events gives a wrong result.
TEST(ScheduleNegativeControl, DetectsWrongResultOfDroppedDependency) {
  ScheduleWorld world = world_of(OpKind::all_reduce, "ring", 3);
  const std::vector<Bytes> inputs = make_inputs(world, true, 1);
  const std::vector<Bytes> wanted = expected(world, inputs);
  const auto wrong = [&] {
    int count = 0;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      std::vector<Bytes> outputs;
      EXPECT_EQ(world.run(seed, inputs, outputs), "");
      count += difference(world, outputs, wanted).empty() ? 0 : 1;
    }
    return count;
  };
  EXPECT_EQ(wrong(), 0);
  drop_dependency(world.schedules[0], 0);
  EXPECT_GT(wrong(), 0);
}

/// In place, dependencies that wait until memory is free matter as well.
TEST(ScheduleNegativeControl, DetectsMissingInPlaceHazard) {
  for (const char* name : {"symmetric", "recursive_doubling"}) {
    ScheduleWorld world = world_of(OpKind::all_reduce, name, 2, ~0u);
    ASSERT_EQ(world.race(), "");
    const Schedule whole = world.schedules[0];
    bool seen = false;
    std::size_t which = 0;
    for (const ScheduleStep& step : whole.steps)
      for (std::uint32_t f = 0; f < step.dependents; ++f, ++which) {
        if (step.kind != ScheduleStep::Kind::send) continue;
        world.schedules[0] = whole;
        drop_dependency(world.schedules[0], which);
        EXPECT_THAT(world.race(), HasSubstr("send"));
        seen = true;
      }
    EXPECT_TRUE(seen) << name;
  }
}

/// Each dependency of these algorithms is needed and its absence is detected, also where buffers are reused in turn.
TEST(ScheduleNegativeControl, DetectsRemovalOfEachDependency) {
  for (const Named& algorithm : algorithms(false)) {
    const std::string& name = algorithm.name;
    if (name != "direct" && name != "symmetric" && name != "ring" && name != "tree" && name != "binomial" &&
        name != "pipelined" && (name != "recursive_doubling" || algorithm.kind != OpKind::all_reduce))
      continue;
    for (const std::uint32_t in_place : {0u, ~0u}) {
      const CollectiveSpec spec{
          .kind = algorithm.kind, .dtype = DType::f64, .ranks = 3, .count = 3 * 330'003, .ordered = false};
      ScheduleWorld world(spec, name, in_place);
      const Schedule whole = world.schedules[1];
      for (std::size_t which = 0; which < whole.dependents.size(); ++which) {
        world.schedules[1] = whole;
        drop_dependency(world.schedules[1], which);
        EXPECT_NE(world.race(), "") << describe(spec, name) << " dependency " << which;
      }
    }
  }
}

TEST(ScheduleNegativeControl, DetectsIncompleteBarrier) {
  ScheduleWorld world(CollectiveSpec{.kind = OpKind::barrier, .ranks = 8}, "dissemination");
  ASSERT_EQ(world.early_leaver(), "");
  drop_dependency(world.schedules[3], 0);
  EXPECT_THAT(world.early_leaver(), HasSubstr("may leave"));
}

TEST(ScheduleNegativeControl, DetectsSwappedSources) {
  const CollectiveSpec spec{.kind = OpKind::all_reduce, .ranks = 4, .count = 400, .ordered = true};
  ScheduleWorld world(spec, "direct");
  ASSERT_EQ(verify(world, false), "");
  Schedule& schedule = world.schedules[2];
  for (const ScheduleStep& step : schedule.steps)
    if (step.sources > 0) std::swap(schedule.sources[step.first_source], schedule.sources[step.first_source + 3]);
  EXPECT_THAT(verify(world, false), HasSubstr("differs"));
}

TEST(ScheduleNegativeControl, DetectsOtherOrder) {
  CollectiveSpec spec{.kind = OpKind::all_reduce, .ranks = 4, .count = 400, .ordered = false};
  EXPECT_THAT(verify(ScheduleWorld(spec, "ring"), false), HasSubstr("differs"));
  spec.ordered = true;
  EXPECT_THAT(refusal(spec, "ring"), HasSubstr("along the tree"));
}

TEST(ScheduleNegativeControl, DetectsRoundingAtEveryHop) {
  CollectiveSpec spec{.kind = OpKind::all_reduce, .dtype = DType::bf16, .ranks = 4, .count = 400, .ordered = false};
  EXPECT_THAT(verify(ScheduleWorld(spec, "recursive_doubling"), false), HasSubstr("differs"));
  spec.ordered = true;
  EXPECT_THAT(refusal(spec, "recursive_doubling"), HasSubstr("at every hop"));
}

TEST(ScheduleNegativeControl, DetectsBrokenMessages) {
  ScheduleWorld world = world_of(OpKind::all_gather, "ring", 3);
  Schedule& schedule = world.schedules[0];
  const Schedule whole = schedule;
  const auto break_first = [&](ScheduleStep::Kind kind, auto change) {
    schedule = whole;
    for (ScheduleStep& step : schedule.steps)
      if (step.kind == kind) {
        change(step);
        return world.check();
      }
    return std::string();
  };
  EXPECT_THAT(break_first(ScheduleStep::Kind::send, [](ScheduleStep& step) { step.number = 9; }),
              HasSubstr("is never"));
  EXPECT_THAT(break_first(ScheduleStep::Kind::send, [](ScheduleStep& step) { step.from.bytes -= 4; }),
              HasSubstr("differ in length"));
  EXPECT_THAT(break_first(ScheduleStep::Kind::receive, [](ScheduleStep& step) { step.to.offset += 4000; }),
              HasSubstr("outside"));
  EXPECT_THAT(break_first(ScheduleStep::Kind::receive, [](ScheduleStep& step) { step.to.place = BufferId::in; }),
              HasSubstr("outside"));
}

/// Two ranks that each receive before they send: every order of events deadlocks.
TEST(ScheduleNegativeControl, DetectsCycle) {
  ScheduleWorld world = world_of(OpKind::all_to_all, "direct", 2);
  for (Schedule& schedule : world.schedules) {
    std::vector<ScheduleStep> steps;
    for (const ScheduleStep::Kind kind : {ScheduleStep::Kind::receive, ScheduleStep::Kind::send})
      for (const ScheduleStep& step : schedule.steps)
        if (step.kind == kind) steps.push_back(step);
    ASSERT_EQ(steps.size(), 2u);
    steps[0].dependents = 1;
    steps[1].waits_for = 1;
    schedule.dependents = {1};
    schedule.steps = steps;
  }
  EXPECT_THAT(world.check(), HasSubstr("circle"));
  std::vector<Bytes> outputs;
  EXPECT_THAT(world.run(1, make_inputs(world, true, 1), outputs), HasSubstr("deadlock"));
}

}  // namespace
}  // namespace tessera::comm_test
