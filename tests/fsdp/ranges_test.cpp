// Trace events as ranges of a profiler: names, nesting, and that each range ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"

namespace tessera::fsdp {
namespace {

using harness::TrainingSpec;
using testing::ElementsAre;

TrainingSpec spec_of(const char* strategy) {
  TrainingSpec spec;
  spec.global_batch = 4;
  spec.engine = harness::engine_for(strategy);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  return spec;
}

/// The ranges of rank 0's second step.
std::vector<std::string> ranges_of_a_step(const char* strategy) {
  TrainingSpec spec = spec_of(strategy);
  spec.steps = 2;
  std::vector<std::string> second;
  spec.after_step = [&](int rank, int, Engine&, nn::CausalModel&) {
    harness::Ranges ranges = harness::take_ranges();
    EXPECT_EQ(ranges.open, 0);
    if (rank == 0) second = std::move(ranges.begun);
  };
  harness::train(spec);
  return second;
}

TEST(Ranges, AreTheEventsOfAStepWithTheirUnits) {
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

/// The loss rejects targets of another shape while the root's forward is open.
void fail_in_forward(nn::CausalModel& model, const TrainingSpec& spec, int rank) {
  const auto batch = harness::make_batch(model.context(), spec, 0, rank);
  const nn::Tensor wrong = nn::Tensor::zeros(model.context(), {1, 1}, base::DType::i32);
  EXPECT_THROW(model.loss(batch.tokens, wrong), base::InvalidUsage);
}

TEST(Ranges, EndAlsoWhereAStepThrows) {
  TrainingSpec spec = spec_of("fsdp");
  spec.after_step = [&](int rank, int, Engine& engine, nn::CausalModel& model) {
    fail_in_forward(model, spec, rank);
    EXPECT_EQ(harness::take_ranges().open, 1) << "the control: nobody has ended it";
    engine.abort_step();
    EXPECT_EQ(harness::take_ranges().open, 0);
  };
  harness::train(spec);
}

TEST(Ranges, OfARecorderEndWithWhatIsAroundThem) {
  const auto device = harness::make_guarded_device();
  const auto stream = device->make_stream();
  {
    base::TraceRecorder recorder(0, device.get());
    const auto outer = recorder.begin(base::TraceEventKind::forward, "a", 0, *stream);
    recorder.begin(base::TraceEventKind::forward, "b", 0, *stream);  // an exception leaves it open
    EXPECT_EQ(harness::take_ranges().open, 2);
    recorder.end(outer, *stream);
    EXPECT_EQ(harness::take_ranges().open, 0);
    recorder.begin(base::TraceEventKind::backward, "c", 0, *stream);
  }
  EXPECT_EQ(harness::take_ranges().open, 0) << "the recorder is gone";
}

}  // namespace
}  // namespace tessera::fsdp
