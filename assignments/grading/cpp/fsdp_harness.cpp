// Trains a model under a student's fully_shard() and, for comparison, under the library's engine with ddp.
#include <functional>
#include <memory>
#include <stdexcept>

#include "4-fsdp/fsdp.h"
#include "grading/cpp/grading.h"
#include "grading/cpp/memory.h"
#include "grading/cpp/model.h"
#include "grading/cpp/reference.h"

namespace {

using namespace tessera;
using grading::Case, grading::Fact, grading::Model, grading::Recorder;

using grading::kLearningRate, grading::kSteps;
constexpr double kSlack = 20'000;  // bytes of objects, hooks and names

/// Looks at the model from inside its units: the hooks of their layers, which are not the student's.
class Observer {
 public:
  explicit Observer(Model& model, Recorder& world) : model_(model), world_(world) {
    for (std::size_t unit = 0; unit < model.children().size(); ++unit) {
      nn::Module& layer = *model.children()[unit]->children().front();
      layer.set_hooks({.pre_forward = [this, unit](nn::Phase) { look(unit, false); },
                       .post_forward = {},
                       .pre_backward = [this, unit] { look(unit, true); },
                       .post_backward = {}});
    }
  }
  /// [unit, 1 in backward, units with memory as bits, calls so far] for each layer that computed.
  const std::vector<double>& seen() const { return seen_; }
  /// As bits: units of which some parameter has memory.
  unsigned unsharded() const {
    unsigned bits = 0;
    for (std::size_t unit = 0; unit < model_.children().size(); ++unit)
      for (const auto& parameter : model_.children()[unit]->parameters())
        if (parameter->tensor().bound()) bits |= 1U << unit;
    return bits;
  }

 private:
  void look(std::size_t unit, bool backward) {
    for (const double value : {static_cast<double>(unit), backward ? 1.0 : 0.0, static_cast<double>(unsharded()),
                               static_cast<double>(world_.calls().size())})
      seen_.push_back(value);
  }
  Model& model_;
  Recorder& world_;
  std::vector<double> seen_;
};

double train_step(nn::Context& context, Model& model, assignment::Fsdp& sharded, int step, int rank) {
  const grading::Batch batch = grading::batch_of(context, step, rank);
  double value = 0;
  {
    const nn::TapeScope recording(context);
    const nn::Tensor loss = model(batch.tokens, batch.targets);
    loss.backward();
    value = loss.item();
  }
  sharded.step(kLearningRate);
  return value;
}

/// Live bytes of the context, the communicator and operator new, without the library's own buffers of collectives.
double live_bytes(nn::Context& context, Recorder& world) {
  const auto of = [](const base::MemoryTracker::Snapshot& live) {
    return static_cast<double>(live.total_now - live.now_of(base::MemoryCategory::communication));
  };
  return of(context.memory_tracker().snapshot()) + of(world.memory_tracker()->snapshot()) +
         static_cast<double>(grading::CountMemory::now());
}

void set_memory(Fact& fact, nn::Context& context, Recorder& world, double at_rest) {
  const auto peak = [&](base::MemoryCategory use) {
    return static_cast<double>(context.memory_tracker().snapshot().peak_of(use) +
                               world.memory_tracker()->snapshot().peak_of(use));
  };
  fact.set("at_rest_bytes", at_rest)
      .set("slack", kSlack)
      .set("peak_unsharded_parameter", peak(base::MemoryCategory::unsharded_parameter))
      .set("peak_unsharded_gradient", peak(base::MemoryCategory::unsharded_gradient));
}

/// The student's shard of a unit. Throws std::logic_error that says of how many.
std::span<const float> shard_of(const assignment::Fsdp& sharded, std::size_t unit, std::size_t units) {
  try {
    return sharded.shard(unit);
  } catch (const std::exception& error) {
    throw std::logic_error("shard(" + std::to_string(unit) + ") failed, and the model's " + std::to_string(units) +
                           " children are as many units: " + error.what());
  }
}

/// Trains with the student's code, and reports everything but the memory before it. Calls `after_first` after a step.
void train(Recorder& world, nn::Context& context, Model& model, assignment::Fsdp& sharded, Fact& fact,
           const std::function<void()>& after_first) {
  Observer observer(model, world);
  const comm::TrafficStats earlier = world.traffic();
  std::vector<double> losses;
  world.clear();
  for (int step = 0; step < kSteps; ++step) {
    world.set_mark(step);
    losses.push_back(train_step(context, model, sharded, step, world.rank()));
    if (step == 0) after_first();
  }
  fact.set("losses", losses).set_calls(world.calls(), {}).set_traffic(world.traffic() - earlier);
  fact.set("seen", observer.seen()).set("unsharded_at_end", static_cast<double>(observer.unsharded()));
}

void run_training(grading::Grading& grading, int ranks) {
  const Case part = {"n" + std::to_string(ranks), ranks, std::to_string(ranks) + (ranks > 1 ? " ranks" : " rank")};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    const grading::Reference reference = grading::train_reference(world);
    std::vector<double> elements;
    for (const auto& unit : reference.final) elements.push_back(static_cast<double>(unit.size()));
    fact.set("expected_losses", reference.losses).set("elements", elements);
    nn::Context context({.memory = {.poison = true}});  // what is used after it was freed is NaN
    Model model(context);
    std::string units;
    for (const auto& child : model.children()) units += (units.empty() ? "" : ",") + child->path();
    fact.set("units", units);
    world.clear();
    world.memory_tracker()->reset_peaks();
    const grading::CountMemory counting;
    const double before = live_bytes(context, world);
    const auto sharded = assignment::fully_shard(model, world);
    if (sharded == nullptr) throw std::logic_error("fully_shard() returned nothing");
    sharded->initialize(/*seed=*/7);
    fact.set("calls_before", static_cast<double>(world.calls().size()));
    const auto write_shards = [&](const std::string& when, const std::vector<std::vector<float>>& expected) {
      for (std::size_t unit = 0; unit < expected.size(); ++unit) {
        grading.write_floats(fact, part, when + "_expected" + std::to_string(unit), expected[unit]);
        grading.write_floats(fact, part, when + "_shard" + std::to_string(unit),
                             shard_of(*sharded, unit, expected.size()));
      }
    };
    write_shards("initial", reference.initial);
    train(world, context, model, *sharded, fact, [&] { write_shards("first", reference.first); });
    set_memory(fact, context, world, live_bytes(context, world) - before);
    write_shards("final", reference.final);
  });
}

/// The last rank fails at its third operation.
void run_fault(grading::Grading& grading) {
  const Case part = {"fault", 3, "3 ranks, of which rank 2 fails in its third operation"};
  grading.run(part, [&](Recorder& world, Fact& fact) {
    nn::Context context;
    Model model(context);
    const auto sharded = assignment::fully_shard(model, world);
    sharded->initialize(/*seed=*/7);
    if (world.rank() == 2) world.fail_after(2);
    fact.set("threw", grading::fails([&] { train_step(context, model, *sharded, 0, world.rank()); }) ? 1 : 0);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return grading::run_grading(argc, argv, [](grading::Grading& grading, const grading::Part& part) {
    if (part.kind == "fault")
      run_fault(grading);
    else
      run_training(grading, part.ranks);
  });
}
