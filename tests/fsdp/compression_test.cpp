// Training with compressing collectives: equal on all ranks, at the formulas' cost, close to plain; unsupported
// combinations are rejected.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/fsdp/carriers.h"

namespace tessera::fsdp {
namespace {

using comm::OpKind;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;
using testing::HasSubstr;

struct Case {
  const char* strategy;
  int ranks;
  const char* mesh;
  Carriers carriers;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.strategy << " on " << c.ranks << " ranks"; }
};

const Case kCases[] = {
    {"ddp", 2, "", everywhere("bf16")},
    {"ddp", 3, "", everywhere("int8")},
    {"ddp", 4, "", {"plain", "plain", "int8_feedback"}},
    {"ddp", 2, "", {"plain", "plain", "powersgd"}},
    {"ddp", 4, "", {"plain", "plain", "powersgd1"}},
    {"ddp", 1, "", {"plain", "plain", "powersgd"}},
    {"zero1", 3, "", {"plain", "int8", "plain"}},
    {"zero2", 2, "", {"plain", "int8_feedback", "plain"}},
    {"fsdp", 1, "", everywhere("int8")},
    {"fsdp", 2, "", everywhere("int8")},
    {"fsdp", 3, "", {"int8", "int8_feedback", "plain"}},
    {"fsdp", 4, "", everywhere("bf16")},
    {"shard_grad_op", 2, "", everywhere("int8")},
    {"hsdp", 4, "2x2", everywhere("int8")},
    {"hsdp", 6, "3x2", {"bf16", "bf16", "int8_feedback"}},
    {"hsdp", 4, "4x1", {"plain", "plain", "powersgd"}},
};

class Compression : public testing::TestWithParam<Case> {
 protected:
  static TrainingSpec spec() {
    const Case& c = GetParam();
    return spec_for(c.strategy, c.ranks, c.carriers, c.mesh);
  }
};

INSTANTIATE_TEST_SUITE_P(Plugins, Compression, testing::ValuesIn(kCases), [](const auto& test) {
  const Case& c = test.param;
  std::string name = c.strategy + std::to_string(c.ranks) + c.mesh + "_" + c.carriers.all_gather + "_" +
                     c.carriers.reduce_scatter + "_" + c.carriers.all_reduce;
  return name;
});

std::uint64_t bytes_of(const EngineTraffic& t) {
  return t.all_gather.bytes_sent + t.reduce_scatter.bytes_sent + t.all_reduce.bytes_sent;
}

TEST_P(Compression, CallsAndBytesEqualTheFormula) {
  for (const char* backend : {"shm", "tcp"}) {
    TrainingSpec given = spec();
    given.backend = backend;
    given.after_step = stats_are_what_was_sent;
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

using Values = std::map<std::string, std::vector<float>>;

/// The parameters of each rank after the last step.
std::vector<Values> parameters_by_rank(TrainingSpec spec) {
  std::mutex mutex;
  std::vector<Values> by_rank(static_cast<std::size_t>(spec.ranks));
  spec.after_step = [&](int rank, int step, Engine& engine, nn::CausalModel&) {
    if (step + 1 != spec.steps) return;
    Values mine;
    engine.state().for_each_parameter([&](const nn::Parameter& parameter, std::span<const float> values) {
      mine[parameter.name()].assign(values.begin(), values.end());
    });
    const std::lock_guard lock(mutex);
    by_rank[static_cast<std::size_t>(rank)] = std::move(mine);
  };
  train(spec);
  return by_rank;
}

TEST_P(Compression, AllRanksEndWithTheSameParameters) {
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

TEST(NegativeControl, ARankThatHasOtherParametersIsSeen) {
  TrainingSpec spec = spec_for("ddp", 2, {});
  spec.engine.collectives.add(OpKind::all_reduce, "partial", [] { return std::make_unique<Partial>(); });
  EXPECT_EQ(parameters_by_rank(spec)[0], parameters_by_rank(spec)[1]);
  spec.engine.strategy.all_reduce = "partial";
  EXPECT_NE(parameters_by_rank(spec)[0], parameters_by_rank(spec)[1]);
}

TEST_P(Compression, LazyStreamsGiveTheSameBits) {
  TrainingSpec given = spec();
  given.engine.clip_norm = 0.5;
  given.engine.poison = true;
  const TrainingRecord eager = train(given);
  given.lazy_streams = true;
  EXPECT_TRUE(same_bits(eager, train(given)));
  given.threads = 2;
  EXPECT_TRUE(same_bits(eager, train(given))) << "threads";
}

TEST_P(Compression, ReallyRounds) {
  if (GetParam().ranks == 1) {
    EXPECT_TRUE(same_bits(train(spec()), train(spec_for(GetParam().strategy, 1, {}))));
    return;
  }
  EXPECT_FALSE(same_bits(train(spec()), train(spec_for(GetParam().strategy, GetParam().ranks, {}, GetParam().mesh))));
}

/// Compression memory: leased buffers while in use, and plug-in state for the lifetime of the plug-in.
TEST(CompressionMemory, IsBookedAsCommunication) {
  const auto peak = [](const Carriers& carriers) {
    return train(spec_for("ddp", 2, carriers)).memory_trackers[0].peak_of(base::MemoryCategory::communication);
  };
  const std::uint64_t plain = peak({}), int8 = peak(everywhere("int8"));
  const std::uint64_t feedback = peak({"plain", "plain", "int8_feedback"});
  EXPECT_GT(int8, plain);
  const TrainingRecord record = train(spec_for("ddp", 2, {}));
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

TEST(NegativeControl, APluginThatSendsMoreThanItSaysIsSeen) {
  TrainingSpec spec = spec_for("fsdp", 2, {});
  spec.engine.collectives.add(OpKind::all_gather, "twice", [] { return std::make_unique<Twice>(); });
  spec.engine.strategy.all_gather = "twice";
  const TrainingRecord record = train(spec);
  const auto formula =
      communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes, {}, {}, spec.engine.collectives);
  EXPECT_EQ(record.all_later.all_gather.bytes_sent, 2 * 2 * formula.bytes.all_gather);
}

// --- other devices and precisions

TEST(CompressionElsewhere, ADevicesMemoryIsNotTouchedByTheHost) {
  for (const Case& c :
       {Case{"ddp", 2, "", everywhere("int8")}, Case{"fsdp", 2, "", everywhere("int8")},
        Case{"zero2", 2, "", {"plain", "int8_feedback", "plain"}}, Case{"hsdp", 4, "2x2", everywhere("bf16")},
        Case{"ddp", 2, "", {"plain", "plain", "powersgd"}}, Case{"ddp", 3, "", {"plain", "plain", "powersgd16"}},
        Case{"hsdp", 4, "4x1", {"plain", "plain", "powersgd1"}}}) {
    TrainingSpec spec = spec_for(c.strategy, c.ranks, c.carriers, c.mesh);
    spec.engine.poison = true;
    const TrainingRecord host = train(spec);
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord device = train(spec);
    EXPECT_TRUE(same_bits(host, device)) << c.strategy;
    for (std::size_t rank = 0; rank < host.later_by_rank.size(); ++rank)
      EXPECT_EQ(bytes_of(host.later_by_rank[rank]), bytes_of(device.later_by_rank[rank]));
  }
}

TEST(CompressionElsewhere, AStepMakesTheHostWaitForNothing) {
  for (TrainingSpec spec :
       {spec_for("fsdp", 2, {"int8", "int8_feedback", "plain"}), spec_for("ddp", 2, {"plain", "plain", "powersgd"})}) {
    spec.steps = 4;
    spec.runtime = harness::make_guarded_device({.lazy = true});
    for (const auto& steps : train(spec).waits)
      for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{});
  }
}

TEST(CompressionElsewhere, OffloadedShardsToo) {
  TrainingSpec spec = spec_for("fsdp", 2, everywhere("int8"));
  const TrainingRecord host = train(spec);
  spec.runtime = harness::make_guarded_device({.lazy = true});
  spec.engine.cpu_offload = true;
  EXPECT_TRUE(same_bits(host, train(spec)));
}

TEST(CompressionElsewhere, Of16BitParametersTheMastersStayExact) {
  for (const char* strategy : {"zero1", "zero2", "fsdp"}) {
    TrainingSpec spec = spec_for(strategy, 3, {"int8", "plain", "plain"});
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

TEST(Refusals, NameThePluginAndTheReason) {
  EXPECT_THAT(refusal_of(spec_for("zero1", 2, everywhere("int8"))),
              HasSubstr("all_gather by int8: it rounds, but strategy zero1"));
  EXPECT_THAT(refusal_of(spec_for("zero2", 2, everywhere("bf16"))), HasSubstr("f32 master weights"));
  EXPECT_THAT(refusal_of(spec_for("hsdp", 4, {"plain", "plain", "powersgd"})),
              HasSubstr("all_reduce by powersgd: needs whole flat parameters"));
  TrainingSpec narrow = spec_for("ddp", 2, {"plain", "plain", "powersgd"});
  narrow.dtype = DType::bf16;
  EXPECT_THAT(refusal_of(narrow), HasSubstr("all_reduce by powersgd: of bf16"));
  EXPECT_THAT(refusal_of(spec_for("fsdp", 2, {"powersgd", "plain", "plain"})), HasSubstr("known: "));
  EXPECT_EQ(refusal_of(spec_for("zero1", 1, everywhere("int8"))), "") << "one rank gathers nothing";
}

}  // namespace
}  // namespace tessera::fsdp
