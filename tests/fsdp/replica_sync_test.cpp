// Local SGD and DiLoCo: replicas train independently and synchronize after every sync period.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "tessera/fsdp/checkpoint.h"
#include "tests/fsdp/checkpoint_support.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::test::TemporaryDirectory;
using testing::HasSubstr;

TrainingSpec sync_spec(const std::string& strategy, const std::string& mesh, int period, int steps) {
  TrainingSpec spec = base_spec(strategy, parse_mesh(mesh).size(), {.layers = 2, .mesh = mesh});
  spec.engine.strategy = with_period(spec.engine.strategy, {.steps = period});
  spec.global_batch = 12;
  spec.steps = steps;
  return spec;
}

TrainingSpec with_sgd(TrainingSpec spec) {
  spec.engine.optimizer = {.kind = nn::OptimizerConfig::Kind::sgd};
  spec.lr = 0.1;
  return spec;
}

/// Parameters of every rank after every step: [step][rank].
std::vector<std::vector<Values>> parameters_by_step(TrainingSpec spec, bool sync_at_end = false) {
  std::mutex mutex;
  std::vector<std::vector<Values>> all(static_cast<std::size_t>(spec.steps),
                                       std::vector<Values>(static_cast<std::size_t>(spec.ranks)));
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
    if (sync_at_end && step + 1 == spec.steps) engine.sync_replicas();
    Values mine = values_of(engine);
    const std::lock_guard lock(mutex);
    all[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)] = std::move(mine);
  };
  train(spec);
  return all;
}

double distance(const Values& a, const Values& b) {
  double most = 0;
  for (const auto& [name, values] : a)
    for (std::size_t i = 0; i < values.size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(values[i]) - b.at(name)[i]));
  return most;
}

bool all_equal(const std::vector<Values>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [&](const Values& v) { return v == ranks[0] && !v.empty(); });
}

struct Case {
  const char* strategy;
  const char* mesh;
  base::DType dtype = base::DType::f32;
  const char* all_reduce = "plain";
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.strategy << " " << c.mesh; }
};

class LocalSgdSync : public testing::TestWithParam<Case> {
 protected:
  static TrainingSpec spec(int steps_apart, int steps) {
    TrainingSpec spec = sync_spec(GetParam().strategy, GetParam().mesh, steps_apart, steps);
    spec.dtype = GetParam().dtype;
    spec.engine.strategy.all_reduce = GetParam().all_reduce;
    return spec;
  }
};

INSTANTIATE_TEST_SUITE_P(Strategies, LocalSgdSync,
                         testing::Values(Case{"diloco", "2x1"}, Case{"diloco", "2x2"}, Case{"local_sgd", "3x1"},
                                         Case{"local_sgd", "1x2"}, Case{"diloco", "2x1", base::DType::bf16},
                                         Case{"diloco", "3x1", base::DType::f32, "int8_feedback"},
                                         Case{"diloco", "2x1", base::DType::f32, "powersgd"},
                                         Case{"local_sgd", "3x2", base::DType::bf16, "int8"}),
                         [](const auto& test) {
                           const Case& c = test.param;
                           return std::string(c.strategy) + c.mesh + "_" + std::string(base::name_of(c.dtype)) + "_" +
                                  c.all_reduce;
                         });

TEST_P(LocalSgdSync, ReplicasAreEqualAfterSyncOnly) {
  const auto steps = parameters_by_step(spec(2, 5), true);
  const bool alone = GetParam().mesh[0] == '1';
  for (const std::size_t synced : {1U, 3U, 4U}) EXPECT_TRUE(all_equal(steps[synced])) << synced;
  for (const std::size_t within : {0U, 2U}) EXPECT_EQ(all_equal(steps[within]), alone) << within;
}

TEST_P(LocalSgdSync, CostEqualsFormula) {
  const TrainingSpec given = spec(2, 5);
  const TrainingRecord record = train(given);
  const Precision precision = make_precision(GetParam().dtype, {});
  const auto formula = communication_formula(given.engine.strategy, record.mesh, record.unit_sizes, precision);
  std::int64_t padded = 0;
  for (const UnitSize& unit : record.unit_sizes) padded += unit.padded;
  const ModelStateBytes memory = model_state_formula(given.engine.strategy, record.mesh, padded, 2, precision);
  for (std::size_t rank = 0; rank < record.later_by_rank.size(); ++rank) {
    const EngineTraffic& later = record.later_by_rank[rank];  // of four steps, with two syncs
    EXPECT_EQ(later.all_gather.bytes_sent, 4 * formula.bytes.all_gather);
    EXPECT_EQ(later.reduce_scatter.bytes_sent, 4 * formula.bytes.reduce_scatter);
    EXPECT_NEAR(static_cast<double>(later.all_reduce.bytes_sent), 4.0 * static_cast<double>(formula.bytes.all_reduce),
                4);
    EXPECT_EQ(later.all_reduce.calls / 4, formula.calls.all_reduce);
    EXPECT_EQ(record.model_state[rank][2], memory.optimizer);
  }
  EXPECT_EQ(record.copied_bytes > 0, std::string(GetParam().all_reduce) == "powersgd");
  if (std::string(GetParam().all_reduce) != "plain") return;
  const auto replicas = static_cast<std::uint64_t>(record.mesh.size_of(kReplicateAxis));
  const auto shards = static_cast<std::uint64_t>(record.mesh.size_of(kShardAxis));
  const std::uint64_t whole = static_cast<std::uint64_t>(padded) / shards * 4;
  EXPECT_EQ(formula.bytes.all_reduce, 2 * (whole / replicas * (replicas - 1)) / 2) << "2 c(R) b Psi / S / H";
}

TEST_P(LocalSgdSync, LazyStreamsAreBitwiseEqual) {
  TrainingSpec given = spec(2, 5);
  given.engine.clip_norm = 0.5;
  given.engine.poison = true;
  const TrainingRecord eager = train(given);
  given.lazy_streams = true;
  EXPECT_TRUE(same_bits(eager, train(given)));
}

/// Syncing the mean after every step equals averaging gradients if the inner optimizer is plain SGD.
TEST(LocalSgd, PeriodOfOneAveragesGradients) {
  TrainingSpec ddp = with_sgd(sync_spec("local_sgd", "4x1", 1, 5));
  ddp.engine.strategy = strategy_named("ddp");
  ddp.engine.mesh = MeshShape::grid(1, 4);
  const Values averaged = train(ddp).parameters;
  for (const char* mesh : {"4x1", "2x2"})  // replicas of one rank, and of two that average their gradients
    EXPECT_LT(distance(train(with_sgd(sync_spec("local_sgd", mesh, 1, 5))).parameters, averaged), 6e-7)
        << mesh << ": 5 steps, each within an ulp of values up to 1";
  // The negative controls: a longer period, and another outer optimizer.
  EXPECT_GT(distance(train(with_sgd(sync_spec("local_sgd", "4x1", 5, 5))).parameters, averaged), 2e-5);
  EXPECT_GT(distance(train(with_sgd(sync_spec("diloco", "4x1", 1, 5))).parameters, averaged), 2e-5);
}

/// theta - lr (1 + momentum) (theta - mean), after the first sync period.
TEST(DiLoCo, OuterStepEqualsPaper) {
  const auto start = parameters_by_step([] {
    TrainingSpec spec = sync_spec("diloco", "3x1", 100, 1);
    spec.lr = 1e-30;
    return spec;
  }());
  const auto apart = parameters_by_step(sync_spec("diloco", "3x1", 100, 3));
  const auto synced = parameters_by_step(sync_spec("diloco", "3x1", 3, 3));
  double worst = 0, moved = 0;
  for (const auto& [name, theta] : start[0][0])
    for (std::size_t i = 0; i < theta.size(); ++i) {
      double mean = 0;
      for (const Values& replica : apart[2]) mean += static_cast<double>(replica.at(name)[i]) / 3;
      const double expected = theta[i] - 0.7 * 1.9 * (theta[i] - mean);
      worst = std::max(worst, std::abs(synced[2][0].at(name)[i] - expected));
      moved = std::max(moved, std::abs(theta[i] - mean));
    }
  EXPECT_LT(worst, 1e-6);
  EXPECT_GT(moved, 1e-2);
}

/// b = momentum b + g, theta -= lr (g + momentum b) at every sync, where g is theta minus the replicas' mean.
TEST(DiLoCo, MomentumPersistsBetweenSyncs) {
  constexpr int kSyncs = 3;
  std::mutex mutex;
  std::vector<Values> synced(kSyncs + 1);
  std::vector<std::vector<Values>> apart(kSyncs, std::vector<Values>(2));
  TrainingSpec spec = sync_spec("diloco", "2x1", 100, kSyncs);
  spec.before_training = [&](Engine& engine, comm::Communicator& control) {
    const Values values = values_of(engine);
    if (control.rank() == 0) synced[0] = values;
  };
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
    const auto sync = static_cast<std::size_t>(step);
    const Values before = values_of(engine);
    engine.sync_replicas();
    const Values after = values_of(engine);
    const std::lock_guard lock(mutex);
    apart[sync][static_cast<std::size_t>(rank)] = before;
    if (rank == 0) synced[sync + 1] = after;
  };
  train(spec);
  double worst = 0, momentum = 0;
  for (const auto& [name, theta] : synced[0]) {
    std::vector<double> buffer(theta.size(), 0);
    for (std::size_t m = 0; m < kSyncs; ++m)
      for (std::size_t i = 0; i < theta.size(); ++i) {
        const double at = synced[m].at(name)[i];
        const double g = at - (static_cast<double>(apart[m][0].at(name)[i]) + apart[m][1].at(name)[i]) / 2;
        momentum = std::max(momentum, std::abs(0.9 * buffer[i]));
        buffer[i] = 0.9 * buffer[i] + g;
        worst = std::max(worst, std::abs(synced[m + 1].at(name)[i] - (at - 0.7 * (g + 0.9 * buffer[i]))));
      }
  }
  EXPECT_LT(worst, 1e-6);
  EXPECT_GT(momentum, 1e-3);  // without momentum the last syncs would give other values
}

/// A second sync in a row has no effect, and initializing drops the momentum of an earlier training.
TEST(DiLoCo, SecondSyncIsNoOpAndInitializeResetsMomentum) {
  std::mutex mutex;
  std::vector<Values> seen;
  const auto record = [&](Engine& engine) {
    const Values values = values_of(engine);
    const std::lock_guard lock(mutex);
    if (engine.mesh().rank() == 0) seen.push_back(values);
  };
  TrainingSpec spec = sync_spec("diloco", "2x1", 2, 8);
  spec.repeat_data = 4;  // the last four steps repeat the first four
  spec.after_step = [&](int, int step, Engine& engine, nn::CausalModel&) {
    if (step % 4 == 3) {
      record(engine);
      engine.sync_replicas();
      record(engine);
      engine.initialize(0);
    }
  };
  train(spec);
  ASSERT_EQ(seen.size(), 4U);
  EXPECT_EQ(seen[0], seen[1]) << "synced twice";
  EXPECT_EQ(seen[0], seen[2]) << "something of the first training was left";
  spec.repeat_data = 0;  // the control: other data
  seen.clear();
  train(spec);
  EXPECT_NE(seen[0], seen[2]);
}

TEST(SyncPeriod, ReplicasClipIndependently) {
  TrainingSpec spec = sync_spec("diloco", "2x2", 2, 4);
  spec.engine.clip_norm = 0.5;
  const TrainingRecord record = train(spec);
  EXPECT_THAT(record.norms, testing::Each(testing::Gt(0.5)));
  EXPECT_TRUE(all_equal(parameters_by_step(spec)[3]));
}

TEST(SyncPeriod, RejectsInvalidOptions) {
  const auto refusal = [](const std::function<void(TrainingSpec&)>& spoil) -> std::string {
    TrainingSpec spec = sync_spec("diloco", "2x1", 2, 1);
    spoil(spec);
    try {
      train(spec);
    } catch (const base::Error& error) {
      return error.what();
    }
    return "";
  };
  const auto sync = [](TrainingSpec& spec) -> Sync& { return spec.engine.strategy.sync.at(kReplicateAxis); };
  EXPECT_EQ(refusal([](TrainingSpec&) {}), "");
  EXPECT_THAT(refusal([&](TrainingSpec& s) { sync(s).period = 0; }), HasSubstr("a sync period of 0 steps"));
  EXPECT_THAT(refusal([&](TrainingSpec& s) { sync(s).outer.momentum = 1; }), HasSubstr("momentum"));
  EXPECT_THAT(refusal([&](TrainingSpec& s) { sync(s).what = Sync::What::gradient; }),
              HasSubstr("once per sync period"));
  EXPECT_THAT(refusal([&](TrainingSpec& s) { s.engine.use_loss_scaling = true; }), HasSubstr("skip different steps"));
  EXPECT_THAT(
      refusal([](TrainingSpec& s) { s.engine.strategy.sync[kShardAxis] = s.engine.strategy.sync[kReplicateAxis]; }),
      HasSubstr("only replicas"));
  EXPECT_THROW(with_period(strategy_named("ddp"), {}), base::InvalidUsage);
  TrainingSpec offloaded = sync_spec("diloco", "2x1", 2, 1);
  offloaded.runtime = harness::make_guarded_device({});
  offloaded.engine.cpu_offload = true;
  EXPECT_THROW(train(offloaded), base::Unsupported);
}

TEST(SyncPeriod, HostAccessesNoDeviceMemory) {
  TrainingSpec spec = sync_spec("diloco", "2x2", 2, 4);
  const TrainingRecord host = train(spec);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  EXPECT_TRUE(same_bits(host, train(spec)));
}

// --- checkpoints within a sync period

TrainingSpec resuming(TrainingSpec spec, const std::string& directory, std::string* dropped, bool forget = false) {
  spec.first_step = 4;
  spec.seed += 1;  // other initial values: all values must come from the checkpoint
  spec.before_training = [=](Engine& engine, comm::Communicator& control) {
    Checkpoint checkpoint(directory);
    const RestoreReport report = restore(engine, checkpoint);
    if (forget) engine.state().load_plugin_state({});
    if (control.rank() == 0) *dropped = report.dropped;
  };
  return spec;
}

TEST_P(LocalSgdSync, ResumesWithinPeriod) {
  const TemporaryDirectory directory;
  std::string dropped;
  const TrainingSpec given = spec(3, 8);  // saved after 4 steps, synced after 3 and 6
  const TrainingRecord whole = train(saving(given, directory.path(), 3));
  EXPECT_EQ(train(resuming(given, directory.path(), &dropped)).parameters, whole.parameters);
  EXPECT_EQ(dropped, "");
  // A training that is resumed within a period and ends there syncs, too.
  const TemporaryDirectory within;
  TrainingSpec last = saving(spec(3, 5), within.path(), 4);
  last.between_steps = [save = last.between_steps](int step, Engine& engine, comm::HostCollectives& control) {
    save(step, engine, control);
    if (step == 4) engine.sync_replicas();
  };
  const TrainingRecord synced = train(last);
  TrainingSpec more = resuming(spec(3, 5), within.path(), &dropped);
  more.before_training = [restore = more.before_training](Engine& engine, comm::Communicator& control) {
    restore(engine, control);
    engine.sync_replicas();
  };
  more.first_step = more.steps;
  EXPECT_EQ(train(more).parameters, synced.parameters);
  // The negative control: without the plug-in state of the last sync.
  EXPECT_NE(train(resuming(given, directory.path(), &dropped, true)).parameters, whole.parameters);
}

/// Saved just after a sync within a period: a sync before the next step has no effect, as in the saving run.
TEST_P(LocalSgdSync, ResumesAfterEarlySync) {
  const TemporaryDirectory directory;
  std::string dropped;
  TrainingSpec first = saving(spec(3, 8), directory.path(), 3);
  first.between_steps = [save = first.between_steps](int step, Engine& engine, comm::HostCollectives& control) {
    if (step == 3) engine.sync_replicas();
    save(step, engine, control);
  };
  const TrainingRecord whole = train(first);
  TrainingSpec more = resuming(spec(3, 8), directory.path(), &dropped);
  more.before_training = [restore = more.before_training](Engine& engine, comm::Communicator& control) {
    restore(engine, control);
    EXPECT_FALSE(engine.state().replicas_apart());
    engine.sync_replicas();
  };
  EXPECT_EQ(train(more).parameters, whole.parameters);
}

TEST(SyncPeriod, OtherWorldsResumeFromLastSync) {
  const TemporaryDirectory directory;
  std::string dropped;
  const auto steps = parameters_by_step(sync_spec("diloco", "2x1", 3, 3));
  train(saving(sync_spec("diloco", "2x1", 3, 5), directory.path(), 3));
  for (const char* strategy : {"ddp", "diloco"}) {
    TrainingSpec other = sync_spec("diloco", "4x1", 3, 4);
    if (std::string(strategy) == "ddp") {
      other.engine.strategy = strategy_named("ddp");
      other.engine.mesh = MeshShape::grid(1, 4);
    }
    EXPECT_EQ(train(resuming(other, directory.path(), &dropped)).parameters, steps[2][0]) << strategy;
    EXPECT_THAT(dropped, HasSubstr("starts empty"));
  }
}

}  // namespace
}  // namespace tessera::fsdp
