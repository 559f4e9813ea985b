// Trace events: their order in a step, and their ranges in a profiler.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fsdp/training_specs.h"
#include "tests/harness/guarded_device.h"

namespace tessera::fsdp {
namespace {

using base::TraceEvent;
using base::TraceEventKind;
using harness::train;
using harness::TrainingRecord;
using testing::ElementsAre;

// --- order

TEST(EventOrder, FsdpPrefetchesOneUnitInForwardAndBackward) {
  const TrainingRecord record = train(base_spec("fsdp"));
  EXPECT_THAT(event_names(record.last_events,
                          {TraceEventKind::unshard_issue, TraceEventKind::forward, TraceEventKind::backward}),
              ElementsAre("unshard_issue root", "unshard_issue h.0", "forward root",  //
                          "unshard_issue h.1", "forward h.0",                         //
                          "unshard_issue h.2", "forward h.1",                         //
                          "forward h.2",                                              // the last unit stays unsharded
                          "backward root", "unshard_issue h.1", "backward h.2",       //
                          "unshard_issue h.0", "backward h.1", "backward h.0"));
}

TEST(EventOrder, WithoutPrefetchGathersAreIssuedOnUse) {
  TrainingSpec spec = base_spec("fsdp");
  spec.engine.prefetch = 0;
  const TrainingRecord record = train(spec);
  EXPECT_THAT(event_names(record.last_events,
                          {TraceEventKind::unshard_issue, TraceEventKind::forward, TraceEventKind::backward}),
              ElementsAre("unshard_issue root", "forward root", "unshard_issue h.0", "forward h.0", "unshard_issue h.1",
                          "forward h.1", "unshard_issue h.2", "forward h.2", "backward root", "backward h.2",
                          "unshard_issue h.1", "backward h.1", "unshard_issue h.0", "backward h.0"));
}

TEST(EventOrder, ReductionsAreWaitedForOneUnitLater) {
  const TrainingRecord record = train(base_spec("fsdp"));
  EXPECT_THAT(event_names(record.last_events, {TraceEventKind::reduce_issue, TraceEventKind::reduce_wait,
                                               TraceEventKind::reshard, TraceEventKind::optimizer_step}),
              ElementsAre("reshard h.0", "reshard h.1",                            // forward
                          "reshard h.2", "reduce_issue h.2",                       //
                          "reshard h.1", "reduce_issue h.1", "reduce_wait h.2",    //
                          "reshard h.0", "reduce_issue h.0", "reduce_wait h.1",    //
                          "reshard root", "reduce_issue root", "reduce_wait h.0",  //
                          "reduce_wait root", "optimizer_step root", "optimizer_step h.0", "optimizer_step h.1",
                          "optimizer_step h.2"));
}

TEST(EventOrder, DdpGathersNothingAndZeroGathersAfterStep) {
  EXPECT_THAT(
      event_names(train(base_spec("ddp")).last_events, {TraceEventKind::unshard_issue, TraceEventKind::reshard}),
      ElementsAre());
  EXPECT_THAT(event_names(train(base_spec("zero1")).last_events,
                          {TraceEventKind::unshard_issue, TraceEventKind::optimizer_step}),
              ElementsAre("optimizer_step root", "unshard_issue root", "optimizer_step h.0", "unshard_issue h.0",
                          "optimizer_step h.1", "unshard_issue h.1", "optimizer_step h.2", "unshard_issue h.2"));
}

TEST(EventOrder, EventsHaveBytesAndTimes) {
  const TrainingRecord record = train(base_spec("fsdp"));
  for (const TraceEvent& event : record.last_events) {
    EXPECT_LE(event.start_ns, event.end_ns);
    EXPECT_GT(event.bytes, 0u);
    EXPECT_EQ(event.rank, 0);
  }
}

// --- profiler ranges

TrainingSpec trace_spec(const char* strategy) {
  TrainingSpec spec = base_spec(strategy, 2, {.layers = 2});
  spec.runtime = harness::make_guarded_device({.lazy = true});
  return spec;
}

/// The ranges of rank 0's second step.
std::vector<std::string> ranges_of_a_step(const char* strategy) {
  TrainingSpec spec = trace_spec(strategy);
  spec.steps = 2;
  std::vector<std::string> second;
  spec.after_step = [&](int rank, int, Engine&, nn::CausalModel&) {
    harness::Ranges ranges = harness::drain_ranges();
    EXPECT_EQ(ranges.open, 0);
    if (rank == 0) second = std::move(ranges.begun);
  };
  train(spec);
  return second;
}

TEST(TraceRanges, NestEventsOfStepWithUnits) {
  EXPECT_THAT(
      ranges_of_a_step("fsdp"),
      ElementsAre("unshard_issue root", "unshard_issue h.0", "unshard_wait root", "forward root", "  unshard_issue h.1",
                  "  unshard_wait h.0", "  forward h.0", "  reshard h.0", "  unshard_wait h.1",
                  "  forward h.1",  // the last unit stays unsharded
                  "backward root", "  unshard_issue h.0", "  backward h.1", "  reshard h.1", "  reduce_issue h.1",
                  "  unshard_wait h.0", "  backward h.0", "  reshard h.0", "  reduce_issue h.0", "  reduce_wait h.1",
                  "reshard root", "reduce_issue root", "reduce_wait h.0", "reduce_wait root", "optimizer_step root",
                  "optimizer_step h.0", "optimizer_step h.1"));
  EXPECT_THAT(ranges_of_a_step("zero1"), testing::Contains("unshard_issue h.1")) << "after the optimizer's step";
}

TEST(TraceRanges, EndWithEnclosingRange) {
  const auto device = harness::make_guarded_device();
  const auto stream = device->make_stream();
  {
    base::TraceRecorder recorder(0, device.get());
    const auto outer = recorder.begin(base::TraceEventKind::forward, "a", 0, *stream);
    recorder.begin(base::TraceEventKind::forward, "b", 0, *stream);  // an exception leaves it open
    EXPECT_EQ(harness::drain_ranges().open, 2);
    recorder.end(outer, *stream);
    EXPECT_EQ(harness::drain_ranges().open, 0);
    recorder.begin(base::TraceEventKind::backward, "c", 0, *stream);
  }
  EXPECT_EQ(harness::drain_ranges().open, 0) << "the recorder is gone";
}

}  // namespace
}  // namespace tessera::fsdp
