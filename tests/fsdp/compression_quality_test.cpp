// Loss of trainings with compressing collectives; recovery from a plug-in that throws.
#include <gtest/gtest.h>

#include <cmath>

#include "plugins/collectives/powersgd.h"
#include "tests/fsdp/carriers.h"

namespace tessera::fsdp {
namespace {

using comm::OpKind;
using harness::train;
using harness::TrainingRecord;
using harness::TrainingSpec;

// --- an exception in a plug-in

/// Throws in its third run on every rank, after it has sent data.
class Failing final : public CollectivePlugin {
 public:
  explicit Failing(std::unique_ptr<CollectivePlugin> inner, bool fails)
      : inner_(std::move(inner)), left_(fails ? 3 : 0) {}
  void prepare(const CollectiveSetup& setup) override { inner_->prepare(setup); }
  void clear_state(Stream& stream) override { inner_->clear_state(stream); }
  WorkChain run(const CollectiveCall& call) override {
    WorkChain works = inner_->run(call);
    if (left_ > 0 && --left_ == 0) throw base::SystemError("planted");
    return works;
  }

 private:
  const std::unique_ptr<CollectivePlugin> inner_;
  int left_;
};

TEST(CompressionRecovery, LeavesTheEngineUsableForTheNextStep) {
  for (const auto& [kind, strategy] : {std::pair(OpKind::all_reduce, "ddp"), std::pair(OpKind::all_gather, "fsdp"),
                                       std::pair(OpKind::reduce_scatter, "fsdp")})
    for (const char* name : {"int8", "int8_feedback", "powersgd"}) {
      const CollectiveRegistry known = CollectiveRegistry::built_in();
      if (!known.has(kind, name)) continue;
      const auto losses = [&, collective = kind](bool fails) {
        TrainingSpec spec = spec_for(strategy, 2, {});
        spec.engine.collectives.add(collective, "failing",
                                    [&] { return std::make_unique<Failing>(known.make(collective, name), fails); });
        (collective == OpKind::all_reduce   ? spec.engine.strategy.all_reduce
         : collective == OpKind::all_gather ? spec.engine.strategy.all_gather
                                            : spec.engine.strategy.reduce_scatter) = "failing";
        spec.retry_failed_steps = true;
        const TrainingRecord record = train(spec);
        EXPECT_EQ(record.failed_steps, fails ? 1 : 0) << name;
        return record.losses;
      };
      EXPECT_EQ(losses(true), losses(false)) << comm::name_of(kind) << " " << name;
    }
}

// --- loss

/// Mean loss of the last 20 of 200 steps of gpt-nano.
double trained_loss(const Carriers& carriers, const char* strategy, const CollectiveRegistry& collectives) {
  TrainingSpec spec = spec_for(strategy, 2, carriers);
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

TEST(CompressionLoss, StaysNearPlain) {
  CollectiveRegistry known = CollectiveRegistry::built_in();
  known.add(OpKind::reduce_scatter, "without_scales", [] { return std::make_unique<WithoutScales>(); });
  known.add(OpKind::all_reduce, "without_feedback",
            [] { return std::make_unique<collectives::PowerSgd>("without_feedback", 4, false); });
  const double plain = trained_loss({}, "fsdp", known);
  ASSERT_LT(plain, 1.8) << "it learns: a model that knows nothing has 5.5";
  for (const char* name : {"bf16", "int8"})
    EXPECT_NEAR(trained_loss(everywhere(name), "fsdp", known), plain, 0.02) << name;
  EXPECT_NEAR(trained_loss({"int8", "int8_feedback", "plain"}, "fsdp", known), plain, 0.02);
  EXPECT_NEAR(trained_loss({"plain", "plain", "powersgd"}, "ddp", known), plain, 0.1);
  // Negative controls: without scales and without error feedback the loss is worse.
  EXPECT_GT(trained_loss({"plain", "without_scales", "plain"}, "fsdp", known), plain + 0.2);
  EXPECT_GT(trained_loss({"plain", "plain", "without_feedback"}, "ddp", known), plain + 0.4);
}

}  // namespace
}  // namespace tessera::fsdp
