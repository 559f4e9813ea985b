// Training with compressing collectives: equal on all ranks, at the formulas' cost, close to plain, with the loss of
// plain; unsupported combinations are rejected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "plugins/collectives/powersgd.h"
#include "tests/fsdp/training_specs.h"

namespace tessera::fsdp {
namespace {

using comm::OpKind;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using testing::HasSubstr;

struct Case {
  const char* strategy;
  int ranks;
  const char* mesh;
  PluginNames plugins;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.strategy << " on " << c.ranks << " ranks"; }
};

const Case kCases[] = {
    {"ddp", 2, "", all_collectives("bf16")},
    {"ddp", 3, "", all_collectives("int8")},
    {"ddp", 4, "", {"plain", "plain", "int8_feedback"}},
    {"ddp", 2, "", {"plain", "plain", "powersgd"}},
    {"ddp", 4, "", {"plain", "plain", "powersgd1"}},
    {"ddp", 1, "", {"plain", "plain", "powersgd"}},
    {"zero1", 3, "", {"plain", "int8", "plain"}},
    {"zero2", 2, "", {"plain", "int8_feedback", "plain"}},
    {"fsdp", 1, "", all_collectives("int8")},
    {"fsdp", 2, "", all_collectives("int8")},
    {"fsdp", 3, "", {"int8", "int8_feedback", "plain"}},
    {"fsdp", 4, "", all_collectives("bf16")},
    {"shard_grad_op", 2, "", all_collectives("int8")},
    {"hsdp", 4, "2x2", all_collectives("int8")},
    {"hsdp", 6, "3x2", {"bf16", "bf16", "int8_feedback"}},
    {"hsdp", 4, "4x1", {"plain", "plain", "powersgd"}},
};

class Compression : public testing::TestWithParam<Case> {
 protected:
  static TrainingSpec spec() {
    const Case& c = GetParam();
    return plugin_spec(c.strategy, c.ranks, c.plugins, c.mesh);
  }
};

INSTANTIATE_TEST_SUITE_P(Plugins, Compression, testing::ValuesIn(kCases), [](const auto& test) {
  const Case& c = test.param;
  std::string name = c.strategy + std::to_string(c.ranks) + c.mesh + "_" + c.plugins.all_gather + "_" +
                     c.plugins.reduce_scatter + "_" + c.plugins.all_reduce;
  return name;
});

std::uint64_t bytes_of(const EngineTraffic& t) {
  return t.all_gather.bytes_sent + t.reduce_scatter.bytes_sent + t.all_reduce.bytes_sent;
}

TEST_P(Compression, CallsAndBytesEqualFormula) {
  for (const char* backend : {"shm", "tcp"}) {
    TrainingSpec given = spec();
    given.backend = backend;
    given.after_step = expect_stats_equal_traffic;
    const TrainingRecord record = train(given);
    const auto formula = communication_formula(given.engine.strategy, record.mesh, record.unit_sizes);
    const auto steps = static_cast<std::uint64_t>(given.steps - 1);
    for (const EngineTraffic& rank : record.later_by_rank) {
      EXPECT_EQ((TrafficVolume{rank.all_gather.calls / steps, rank.reduce_scatter.calls / steps,
                               rank.all_reduce.calls / steps}),
                formula.calls);
      EXPECT_EQ((TrafficVolume{rank.all_gather.bytes_sent / steps, rank.reduce_scatter.bytes_sent / steps,
                               rank.all_reduce.bytes_sent / steps}),
                formula.bytes);
      EXPECT_EQ(bytes_of(rank) % steps, 0U);
    }
    if (given.ranks == 1) {
      EXPECT_EQ(bytes_of(record.all_later), 0U);
    }
  }
}

/// The parameters of each rank after the last step.
std::vector<Values> parameters_by_rank(TrainingSpec spec) {
  std::mutex mutex;
  std::vector<Values> by_rank(static_cast<std::size_t>(spec.ranks));
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
    if (step + 1 != spec.steps) return;
    Values mine = values_of(engine);
    const std::lock_guard lock(mutex);
    by_rank[static_cast<std::size_t>(rank)] = std::move(mine);
  };
  train(spec);
  return by_rank;
}

TEST_P(Compression, ParametersAreEqualOnAllRanks) {
  for (const Values& mine : parameters_by_rank(spec())) {
    EXPECT_EQ(mine, parameters_by_rank(spec())[0]);
    EXPECT_FALSE(mine.empty());
  }
}

/// Negative control: rank 1 adds a small value to its own result.
class Partial final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& transfer : call.transfers) works.add(start_plain(OpKind::all_reduce, call, transfer));
    if (call.channel.rank() == 1)
      works.then([out = static_cast<float*>(call.transfers[0].out.data)](Stream& stream) {
        stream.run([out] { *out += 1e-3F; });
        return WorkChain();
      });
    return works;
  }
};

TEST(Compression, DetectsDifferentParametersOnOneRank) {
  TrainingSpec spec = plugin_spec("ddp", 2, {});
  spec.engine.collectives.add(OpKind::all_reduce, "partial", [] { return std::make_unique<Partial>(); });
  EXPECT_EQ(parameters_by_rank(spec)[0], parameters_by_rank(spec)[1]);
  spec.engine.strategy.all_reduce = "partial";
  EXPECT_NE(parameters_by_rank(spec)[0], parameters_by_rank(spec)[1]);
}

TEST_P(Compression, LazyStreamsAreBitwiseEqual) {
  TrainingSpec given = spec();
  given.engine.clip_norm = 0.5;
  given.engine.poison = true;
  const TrainingRecord eager = train(given);
  given.lazy_streams = true;
  EXPECT_TRUE(same_bits(eager, train(given)));
  given.threads = 2;
  EXPECT_TRUE(same_bits(eager, train(given))) << "threads";
}

TEST_P(Compression, DiffersFromUncompressed) {
  if (GetParam().ranks == 1) {
    EXPECT_TRUE(same_bits(train(spec()), train(plugin_spec(GetParam().strategy, 1, {}))));
    return;
  }
  EXPECT_FALSE(
      same_bits(train(spec()), train(plugin_spec(GetParam().strategy, GetParam().ranks, {}, GetParam().mesh))));
}

/// Compression memory: leased buffers while in use, and plug-in state for the lifetime of the plug-in.
TEST(CompressionMemory, IsTrackedAsCommunication) {
  const auto peak = [](const PluginNames& plugins) {
    return train(plugin_spec("ddp", 2, plugins)).memory_trackers[0].peak_of(base::MemoryCategory::communication);
  };
  const std::uint64_t plain = peak({}), int8 = peak(all_collectives("int8"));
  const std::uint64_t feedback = peak({"plain", "plain", "int8_feedback"});
  EXPECT_GT(int8, plain);
  const TrainingRecord record = train(plugin_spec("ddp", 2, {}));
  std::uint64_t padded = 0;
  for (const UnitSize& unit : record.unit_sizes) padded += static_cast<std::uint64_t>(unit.padded);
  EXPECT_EQ(feedback - int8, padded * 4 * 3 / 2) << "an f32 for each value that is sent, and for each that is summed";
}

/// Negative control of the costs: a plug-in that sends more than it reports is detected.
class Twice final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (int i = 0; i < 2; ++i)
      for (const FlatTransfer& transfer : call.transfers) works.add(start_plain(OpKind::all_gather, call, transfer));
    return works;
  }
};

TEST(Compression, DetectsPluginThatUnderreportsBytes) {
  TrainingSpec spec = plugin_spec("fsdp", 2, {});
  spec.engine.collectives.add(OpKind::all_gather, "twice", [] { return std::make_unique<Twice>(); });
  spec.engine.strategy.all_gather = "twice";
  const TrainingRecord record = train(spec);
  const auto formula =
      communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {}, {}, spec.engine.collectives);
  EXPECT_EQ(record.all_later.all_gather.bytes_sent, 2 * 2 * formula.bytes.all_gather);
}

// --- other devices and precisions

TEST(CompressionOnDevices, HostAccessesNoDeviceMemory) {
  for (const Case& c :
       {Case{"ddp", 2, "", all_collectives("int8")}, Case{"fsdp", 2, "", all_collectives("int8")},
        Case{"zero2", 2, "", {"plain", "int8_feedback", "plain"}}, Case{"hsdp", 4, "2x2", all_collectives("bf16")},
        Case{"ddp", 2, "", {"plain", "plain", "powersgd"}}, Case{"ddp", 3, "", {"plain", "plain", "powersgd16"}},
        Case{"hsdp", 4, "4x1", {"plain", "plain", "powersgd1"}}}) {
    TrainingSpec spec = plugin_spec(c.strategy, c.ranks, c.plugins, c.mesh);
    spec.engine.poison = true;
    const TrainingRecord host = train(spec);
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord device = train(spec);
    EXPECT_TRUE(same_bits(host, device)) << c.strategy;
    for (std::size_t rank = 0; rank < host.later_by_rank.size(); ++rank)
      EXPECT_EQ(bytes_of(host.later_by_rank[rank]), bytes_of(device.later_by_rank[rank]));
  }
}

TEST(CompressionOnDevices, StepNeverMakesHostWait) {
  for (TrainingSpec spec : {plugin_spec("fsdp", 2, {"int8", "int8_feedback", "plain"}),
                            plugin_spec("ddp", 2, {"plain", "plain", "powersgd"})}) {
    spec.steps = 4;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    for (const auto& steps : train(spec).waits)
      for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
  }
}

TEST(CompressionOnDevices, CpuOffloadIsBitwiseEqual) {
  TrainingSpec spec = plugin_spec("fsdp", 2, all_collectives("int8"));
  const TrainingRecord host = train(spec);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  spec.engine.cpu_offload = true;
  EXPECT_TRUE(same_bits(host, train(spec)));
}

TEST(CompressionPrecision, MasterWeightsStayExact) {
  for (const char* strategy : {"zero1", "zero2", "fsdp"}) {
    TrainingSpec spec = plugin_spec(strategy, 3, {"int8", "plain", "plain"});
    spec.dtype = DType::bf16;
    spec.engine.reduce_dtype = DType::f32;
    const TrainingRecord int8 = train(spec);
    spec.engine.strategy.all_gather = "bf16";
    const TrainingRecord bf16 = train(spec);
    spec.engine.strategy.all_gather = "plain";
    EXPECT_TRUE(same_bits(bf16, train(spec))) << "16 bits travel as they are";
    EXPECT_FALSE(same_bits(int8, bf16));
    for (std::size_t i = 0; i < int8.losses.size(); ++i) EXPECT_NEAR(int8.losses[i], bf16.losses[i], 0.02);
  }
}

// --- rejected combinations

std::string refusal_of(TrainingSpec spec) {
  try {
    train(spec);
  } catch (const base::Error& error) {
    return error.what();
  }
  return "";
}

TEST(CompressionErrors, NamePluginAndReason) {
  EXPECT_THAT(refusal_of(plugin_spec("zero1", 2, all_collectives("int8"))),
              HasSubstr("all_gather by int8: it rounds, but strategy zero1"));
  EXPECT_THAT(refusal_of(plugin_spec("zero2", 2, all_collectives("bf16"))), HasSubstr("f32 master weights"));
  EXPECT_THAT(refusal_of(plugin_spec("hsdp", 4, {"plain", "plain", "powersgd"})),
              HasSubstr("all_reduce by powersgd: needs whole flat parameters"));
  TrainingSpec half = plugin_spec("ddp", 2, {"plain", "plain", "powersgd"});
  half.dtype = DType::bf16;
  EXPECT_THAT(refusal_of(half), HasSubstr("all_reduce by powersgd: bf16 is not supported"));
  EXPECT_THAT(refusal_of(plugin_spec("fsdp", 2, {"powersgd", "plain", "plain"})), HasSubstr("known: "));
  EXPECT_EQ(refusal_of(plugin_spec("zero1", 1, all_collectives("int8"))), "") << "one rank gathers nothing";
}

// --- loss

/// Mean loss of the last 20 of 200 steps of gpt-nano.
double trained_loss(const PluginNames& plugins, const char* strategy, const CollectiveRegistry& collectives) {
  TrainingSpec spec = plugin_spec(strategy, 2, plugins);
  spec.steps = 200;
  spec.lr = 3e-3;
  spec.repeat_data = 64;
  spec.engine.collectives = collectives;
  const TrainingRecord record = train(spec);
  double sum = 0;
  for (std::size_t i = record.losses.size() - 20; i < record.losses.size(); ++i) sum += record.losses[i] / 20;
  return sum;
}

/// int8 without scales: one step size for all values, for values up to 16.
class WithoutScales final : public CollectivePlugin {
 public:
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& transfer : call.transfers) {
      auto* values = static_cast<float*>(const_cast<void*>(transfer.in.data));
      for (std::size_t i = 0; i < transfer.in.count; ++i) values[i] = std::nearbyint(values[i] * 8.0F) / 8.0F;
      works.add(start_plain(OpKind::reduce_scatter, call, transfer));
    }
    return works;
  }
};

TEST(CompressionLoss, StaysCloseToUncompressed) {
  CollectiveRegistry known = CollectiveRegistry::built_in();
  known.add(OpKind::reduce_scatter, "without_scales", [] { return std::make_unique<WithoutScales>(); });
  known.add(OpKind::all_reduce, "without_feedback",
            [] { return std::make_unique<collectives::PowerSgd>("without_feedback", 4, false); });
  const double plain = trained_loss({}, "fsdp", known);
  ASSERT_LT(plain, 1.8) << "it learns: a model that knows nothing has 5.5";
  for (const char* name : {"bf16", "int8"})
    EXPECT_NEAR(trained_loss(all_collectives(name), "fsdp", known), plain, 0.02) << name;
  EXPECT_NEAR(trained_loss({"int8", "int8_feedback", "plain"}, "fsdp", known), plain, 0.02);
  EXPECT_NEAR(trained_loss({"plain", "plain", "powersgd"}, "ddp", known), plain, 0.1);
  // Negative controls: without scales and without error feedback the loss is worse.
  EXPECT_GT(trained_loss({"plain", "without_scales", "plain"}, "fsdp", known), plain + 0.2);
  EXPECT_GT(trained_loss({"plain", "plain", "without_feedback"}, "ddp", known), plain + 0.4);
}

}  // namespace
}  // namespace tessera::fsdp
