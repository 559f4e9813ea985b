// NF4 weights under compressed gathers, after apply_requires_grad(), and in planned units: their bytes do not change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fsdp/models.h"
#include "tests/harness/guarded_device.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::fsdp {
namespace {

using base::DType;
using comm::OpKind;
using harness::same_bits;
using harness::train;
using harness::TrainingRecord;
using nn::test::error_of;
using testing::HasSubstr;

Values quantized_values_of(Engine& engine) {
  Values values;
  engine.state().for_each_parameter([&](const fsdp::Parameter& p, std::span<const float> v) {
    if (p.dtype() == DType::u8) values[p.name()].assign(v.begin(), v.end());
  });
  return values;
}

/// Encodings at the end of a run.
Values quantized_values_of(const TrainingRecord& record, const Values& like) {
  Values values;
  for (const auto& [name, unused] : like) values[name] = record.parameters.at(name);
  return values;
}

Values initial_quantized_values() {
  TrainingSpec spec = quantized(lora_spec("ddp", 1));
  spec.steps = 0;
  Values values;
  spec.before_training = [&, fill = spec.before_training](Engine& engine, comm::Communicator& control) {
    fill(engine, control);
    values = quantized_values_of(engine);
  };
  train(spec);
  return values;
}

TEST(QuantizedGathers, CompressionLeavesNf4WeightsExactAtFormulaCost) {
  const Values quantized_values = initial_quantized_values();
  ASSERT_EQ(quantized_values.size(), 12U) << "four in each block";
  for (const auto& [strategy, ranks] : {std::pair("fsdp", 2), std::pair("fsdp", 3), std::pair("hsdp", 4)})
    for (const char* plugin : {"int8", "bf16"}) {
      TrainingSpec spec = quantized(lora_spec(strategy, ranks));
      spec.engine.strategy.all_gather = plugin;
      spec.lazy_streams = spec.engine.poison = true;
      spec.after_step = expect_stats_equal_traffic;
      const TrainingRecord record = train(spec);
      EXPECT_EQ(quantized_values_of(record, quantized_values), quantized_values) << strategy << plugin;
      const auto formula = communication_formula(spec.engine.strategy, record.mesh, record.unit_sizes);
      for (const EngineTraffic& rank : record.later_by_rank) {
        EXPECT_EQ(harness::calls_per_step(rank, spec.steps - 1), formula.calls) << strategy << plugin;
        EXPECT_EQ(harness::bytes_per_step(rank, spec.steps - 1), formula.bytes) << strategy << plugin;
      }
      spec.engine.strategy.all_gather = "plain";
      EXPECT_FALSE(same_bits(record, train(spec))) << "the rest is rounded";
    }
}

/// Changes a byte of every encoding that it gathers; reports the given capabilities.
class Damaging final : public CollectivePlugin {
 public:
  explicit Damaging(CollectiveCapabilities capabilities) : capabilities_(std::move(capabilities)) {}
  CollectiveCapabilities capabilities() const override { return capabilities_; }
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works;
    for (const FlatTransfer& transfer : call.transfers) works.add(start_plain(OpKind::all_gather, call, transfer));
    works.then([transfers = std::vector<FlatTransfer>(call.transfers.begin(), call.transfers.end())](Stream& stream) {
      for (const FlatTransfer& transfer : transfers)
        if (transfer.out.dtype == DType::u8)
          stream.run([out = static_cast<std::uint8_t*>(transfer.out.data)] { *out ^= 0xFF; });
      return WorkChain();
    });
    return works;
  }

 private:
  const CollectiveCapabilities capabilities_;
};

/// The negative control is the plug-in that claims to be exact for all dtypes: it gathers the encodings.
TEST(QuantizedGathers, DetectLossyPluginThatClaimsExactness) {
  TrainingSpec spec = quantized(lora_spec("fsdp", 2));
  const TrainingRecord plain = train(spec);
  const auto with = [&](CollectiveCapabilities capabilities) {
    spec.engine.collectives.add(OpKind::all_gather, "damaging",
                                [capabilities] { return std::make_unique<Damaging>(capabilities); });
    spec.engine.strategy.all_gather = "damaging";
    return train(spec);
  };
  EXPECT_TRUE(same_bits(with({.exact = false}), plain));
  EXPECT_TRUE(same_bits(with({.dtypes = {DType::f32}}), plain));
  EXPECT_FALSE(same_bits(with({}), plain));
}

/// A device whose memory the host can't access and whose work runs as late as possible: the host's bits, and no wait
/// for decoded weights.
TEST(QuantizedWeights, DeviceIsBitwiseEqualAndHostNeverWaits) {
  for (const auto& [strategy, ranks] : {std::pair("ddp", 1), std::pair("fsdp", 2), std::pair("zero2", 2)}) {
    TrainingSpec spec = quantized(lora_spec(strategy, ranks));
    spec.steps = 4;
    spec.engine.poison = true;
    const TrainingRecord host = train(spec);
    spec.runtime = harness::make_guarded_device({.lazy = true});
    const TrainingRecord device = train(spec);
    EXPECT_TRUE(same_bits(device, host)) << strategy;
    for (const auto& steps : device.waits)
      for (std::size_t step = 2; step < steps.size(); ++step) EXPECT_EQ(steps[step], harness::HostWaits{}) << strategy;
    spec.seed = 1;  // the negative control
    EXPECT_FALSE(same_bits(train(spec), host)) << strategy;
  }
}

/// Freezing and unfreezing a unit's adapters rebuilds its layout, including its encodings.
TEST(QuantizedWeights, ApplyRequiresGradKeepsEveryBit) {
  const Values quantized_values = initial_quantized_values();
  const auto run = [&](TrainingSpec spec, bool refreezes) {
    spec.steps = 4;
    spec.global_batch = 12;
    spec.engine.clip_norm = 0;
    spec.after_step = [&, refreezes](int, int step, Engine& engine, nn::CausalModel& model) {
      if (!refreezes || step > 1) return;
      for (const auto& parameter : model.parameters()) {
        nn::Tensor tensor = parameter->tensor();
        if (nn::is_adapter(parameter->name()) && parameter->name().find("h.1.") != std::string::npos)
          tensor.set_requires_grad(step == 1);
      }
      engine.apply_requires_grad();
      EXPECT_EQ(quantized_values_of(engine), quantized_values);
    };
    return train(spec);
  };
  const TrainingRecord ddp = run(quantized(lora_spec("ddp", 2)), true);
  EXPECT_FALSE(same_bits(ddp, run(quantized(lora_spec("ddp", 2)), false))) << "the control";
  TrainingSpec compressed = quantized(lora_spec("fsdp", 2));
  compressed.engine.strategy.all_gather = "int8";
  EXPECT_EQ(quantized_values_of(run(compressed, true), quantized_values), quantized_values);
  for (const char* strategy : {"zero2", "fsdp", "hsdp"})
    EXPECT_TRUE(same_bits(run(quantized(lora_spec(strategy, 2)), true), ddp)) << strategy;
  TrainingSpec offloaded = quantized(lora_spec("fsdp", 2));
  offloaded.runtime = harness::make_guarded_device({.lazy = true});
  offloaded.engine.cpu_offload = true;
  EXPECT_TRUE(same_bits(run(offloaded, true), ddp)) << "with shards in the host's memory";
}

TEST(QuantizedWeights, RejectRequiresGrad) {
  TrainingSpec spec = quantized(lora_spec("fsdp", 2));
  spec.after_step = [](int, int, Engine& engine, nn::CausalModel& model) {
    std::string name;
    for (const auto& parameter : model.parameters()) {
      if (parameter->dtype() != DType::u8 || !name.empty()) continue;
      name = parameter->name();
      nn::Tensor tensor = parameter->tensor();
      tensor.set_requires_grad(true);
      EXPECT_THAT(error_of<base::InvalidUsage>([&] { engine.apply_requires_grad(); }),
                  HasSubstr("apply_requires_grad: " + name + " is quantized and cannot be trained"));
      tensor.set_requires_grad(false);
    }
    EXPECT_FALSE(name.empty());
    engine.apply_requires_grad();
  };
  EXPECT_FALSE(train(spec).parameters.empty());
}

TEST(QuantizedWeights, PlannedUnitsEqualEngineUnits) {
  for (const char* strategy : {"ddp", "fsdp"}) {
    const TrainingSpec spec = quantized(lora_spec(strategy, 3));
    const TrainingRecord record = train(spec);
    nn::Context context;
    const auto model = spec.make_model(context);
    const std::vector<UnitSize> planned =
        planned_units(NnModel(*model).root(), "block", spec.engine.strategy, record.mesh);
    ASSERT_EQ(planned.size(), record.unit_sizes.size());
    for (std::size_t i = 0; i < planned.size(); ++i) {
      EXPECT_EQ(planned[i].bytes, record.unit_sizes[i].bytes);
      EXPECT_EQ(planned[i].frozen, record.unit_sizes[i].frozen);
      EXPECT_EQ(planned[i].padded, record.unit_sizes[i].padded);
      EXPECT_EQ(planned[i].bytes == 0, planned[i].is_root);
    }
  }
}

}  // namespace
}  // namespace tessera::fsdp
