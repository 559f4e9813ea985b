// Trains a model under a student's data_parallel() and, for comparison, under the library's engine with ddp.
#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "2-ddp/ddp.h"
#include "grading/cpp/grading.h"
#include "grading/cpp/reference.h"
#include "tessera/nn/optimizer.h"

namespace {

using namespace tessera;
using grading::Case, grading::Fact, grading::kLearningRate, grading::kSteps, grading::Model, grading::Recorder;

constexpr std::chrono::milliseconds kUnitTime{40};
constexpr double kSlowLink = 0.6e6;  // bytes per second

/// Marks calls with the unit whose backward computes, from the hooks of its layers, which are not the student's.
void mark_units(Model& model, Recorder& world, std::chrono::milliseconds computes) {
  for (std::size_t unit = 0; unit < model.children().size(); ++unit)
    model.children()[unit]->children().front()->set_hooks({.pre_forward = {},
                                                           .post_forward = {},
                                                           .pre_backward =
                                                               [&world, unit, computes] {
                                                                 world.set_mark(static_cast<int>(unit));
                                                                 std::this_thread::sleep_for(computes);
                                                               },
                                                           .post_backward = {}});
}

void update(Model& model, assignment::Ddp& ddp, int step) {
  const auto parameters = model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::span<const float> gradient = ddp.gradient(i);
    if (static_cast<std::int64_t>(gradient.size()) != parameters[i]->count())
      throw std::logic_error("gradient(" + std::to_string(i) + ") has " + std::to_string(gradient.size()) +
                             " elements, " + parameters[i]->name() + " has " + std::to_string(parameters[i]->count()));
    nn::update(model.context(), {.kind = base::OptimizerConfig::Kind::sgd},
               {.number = static_cast<std::uint64_t>(step) + 1, .learning_rate = kLearningRate},
               {.values = parameters[i]->tensor().data<float>(),
                .gradients = gradient.data(),
                .count = parameters[i]->count()});
    parameters[i]->gradient().clear();
  }
}

double train_step(Model& model, Recorder& world, assignment::Ddp& ddp, int step) {
  const grading::Batch batch = grading::batch_of(model.context(), step, world.rank());
  double value = 0;
  {
    const nn::TapeScope recording(model.context());
    const nn::Tensor loss = model(batch.tokens, batch.targets);
    loss.backward();
    value = loss.item();
  }
  world.set_mark(-1);  // outside of the backward
  ddp.finish();
  update(model, ddp, step);
  return value;
}

std::unique_ptr<assignment::Ddp> make(Model& model, Recorder& world, std::size_t bucket_bytes) {
  auto ddp = assignment::data_parallel(model, world, bucket_bytes);
  if (ddp == nullptr) throw std::logic_error("data_parallel() returned nothing");
  return ddp;
}

void set_parameters(Fact& fact, Model& model) {
  std::string names, units;
  std::vector<double> counts;
  for (std::size_t unit = 0; unit < model.children().size(); ++unit)
    for (const auto& parameter : model.children()[unit]->parameters()) {
      names += (names.empty() ? "" : ",") + parameter->name();
      units += (units.empty() ? "" : ",") + std::to_string(unit);
      counts.push_back(static_cast<double>(parameter->count()));
    }
  fact.set("parameters", names).set("units_of", units).set("counts", counts);
}

void run_training(grading::Grading& grading, int ranks, std::size_t bucket_bytes, const grading::Skipped& skipped) {
  const std::string buckets = std::to_string(bucket_bytes);
  const Case part = {"n" + std::to_string(ranks) + "-" + buckets + (skipped ? "-unused" : ""), ranks,
                     std::to_string(ranks) + (ranks > 1 ? " ranks" : " rank") + ", buckets of " + buckets + " bytes" +
                         (skipped ? ", block1 unused in step 1, and on rank 1 in step 2" : "")};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    const grading::Reference reference = grading::train_reference(world, skipped);
    nn::Context context({.memory = {.poison = true}});
    Model model(context);
    model.materialize(/*seed=*/7);
    set_parameters(fact, model);
    fact.set("expected_losses", reference.losses).set("bucket_bytes", static_cast<double>(bucket_bytes));
    world.clear();
    const auto ddp = make(model, world, bucket_bytes);
    mark_units(model, world, {});
    const comm::TrafficStats earlier = world.traffic();
    std::vector<double> losses;
    for (int step = 0; step < kSteps; ++step) {
      if (skipped) model.skip_block(skipped(step, world.rank()));
      losses.push_back(train_step(model, world, *ddp, step));
      if (step == 0) fact.set_calls(world.calls(), {});
    }
    fact.set("losses", losses).set_traffic(world.traffic() - earlier);
    const auto units = grading::parameters_of(model);
    std::vector<float> all, expected;
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      all.insert(all.end(), units[unit].begin(), units[unit].end());
      expected.insert(expected.end(), reference.final[unit].begin(), reference.final[unit].end());
    }
    grading.write_floats(fact, part, "final", all);
    grading.write_floats(fact, part, "expected", expected);
  });
}

/// The fastest of three steps over a slow link, in which the backward of each unit takes its time.
void run_slow(grading::Grading& grading, std::size_t bucket_bytes) {
  const Case part = {"slow", 2, "2 ranks over a link of 0.6 MB/s"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    nn::Context context({.memory = {.poison = true}});
    Model model(context);
    model.materialize(/*seed=*/7);
    const auto ddp = make(model, world, bucket_bytes);
    mark_units(model, world, kUnitTime);
    double count = 0;
    for (const auto& parameter : model.parameters()) count += static_cast<double>(parameter->count());
    world.set_link({.latency = std::chrono::microseconds(0), .bytes_per_second = kSlowLink});
    double took = 1e9;
    for (int step = 0; step < kSteps; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      train_step(model, world, *ddp, step);
      took =
          std::min(took, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    fact.set("took_ms", took).set("link_ms", 4 * count / kSlowLink * 1e3);
    fact.set("compute_ms", static_cast<double>(kUnitTime.count() * static_cast<long>(model.children().size())));
  });
}

/// The last rank fails instead of its all_reduce.
void run_fault(grading::Grading& grading, std::size_t bucket_bytes) {
  const Case part = {"fault", 3, "3 ranks, of which rank 2 fails in its first operation"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    nn::Context context({.memory = {.poison = true}});
    Model model(context);
    model.materialize(/*seed=*/7);
    const auto ddp = make(model, world, bucket_bytes);
    if (world.rank() == 2) world.fail_after(0);
    fact.set("threw", grading::fails([&] { train_step(model, world, *ddp, 0); }) ? 1 : 0);
  });
}

std::size_t skipped_block(int step, int rank) { return step == 1 || (step == 2 && rank == 1) ? 1 : grading::kBlocks; }

}  // namespace

int main(int argc, char** argv) {
  return grading::run_grading(argc, argv, [](grading::Grading& grading, const grading::Part& part) {
    if (part.kind == "train") run_training(grading, part.ranks, part.amount, {});
    if (part.kind == "unused") run_training(grading, part.ranks, part.amount, skipped_block);
    if (part.kind == "slow") run_slow(grading, part.amount);
    if (part.kind == "fault") run_fault(grading, part.amount);
  });
}
