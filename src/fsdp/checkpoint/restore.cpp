// A checkpoint into an engine of any shape.
#include <algorithm>

#include "tessera/fsdp/checkpoint.h"
#include "tessera/nn/tensor.h"

namespace tessera::fsdp {
namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kMost) text += " and " + std::to_string(names.size() - kMost) + " more";
  return text;
}

const CheckpointTensor* find(const Checkpoint& checkpoint, const std::string& name) {
  const auto& tensors = checkpoint.tensors();
  const auto found = std::lower_bound(tensors.begin(), tensors.end(), name,
                                      [](const CheckpointTensor& t, const std::string& n) { return t.name < n; });
  return found != tensors.end() && found->name == name ? &*found : nullptr;
}

/// Throws where it doesn't fit, before anything is changed.
RestoreReport compare(Engine& engine, const Checkpoint& checkpoint, const RestoreOptions& options) {
  RestoreReport report;
  std::vector<std::string> names;
  for (const auto& parameter : engine.parameters()) {
    names.push_back(parameter->name());
    const CheckpointTensor* tensor = find(checkpoint, parameter->name());
    if (tensor == nullptr) {
      report.missing.push_back(parameter->name());
      continue;
    }
    if (tensor->shape != parameter->shape())
      throw InvalidUsage(checkpoint.folder() + ": '" + tensor->name + "' has shape " + nn::to_string(tensor->shape) +
                         ", the model's " + nn::to_string(parameter->shape()));
    if (options.optimizer && parameter->tensor().requires_grad() && tensor->states != engine.states())
      throw InvalidUsage(checkpoint.folder() + ": the optimizer kept " + std::to_string(tensor->states) +
                         " values for each element of '" + tensor->name + "', this one keeps " +
                         std::to_string(engine.states()) + "; give the optimizer that it was written with");
  }
  std::sort(names.begin(), names.end());
  for (const CheckpointTensor& tensor : checkpoint.tensors())
    if (!std::binary_search(names.begin(), names.end(), tensor.name)) report.unexpected.push_back(tensor.name);
  if (!options.strict || (report.missing.empty() && report.unexpected.empty())) return report;
  std::string text = checkpoint.folder() + ": not this model's:";
  if (!report.missing.empty()) text += " it lacks " + listed(report.missing);
  if (!report.unexpected.empty())
    text += std::string(report.missing.empty() ? "" : ";") + " the model has no " + listed(report.unexpected);
  throw InvalidUsage(text);
}

/// What plug-ins carry is each rank's own: it comes back where every rank finds what it had, else all begin anew.
std::string restore_carried(Engine& engine, Checkpoint& checkpoint) {
  std::vector<Checkpoint::Carried> expected;
  for (const CollectivePlugin::State& state : engine.carried()) expected.push_back({state.name, state.count});
  std::sort(expected.begin(), expected.end());
  const int ranks = engine.mesh().size();
  bool fits = checkpoint.ranks() == ranks, has_some = false;
  for (int rank = 0; rank < checkpoint.ranks(); ++rank) {
    const std::vector<Checkpoint::Carried> found = checkpoint.carried(rank);
    has_some = has_some || !found.empty();
    fits = fits && found == expected;
  }
  if (!fits) {
    engine.fill_carried({});
    if (expected.empty() && !has_some) return "";
    return checkpoint.folder() + ": what collectives carry from step to step is not there for this world, strategy " +
           "and choice of collectives; they begin anew";
  }
  engine.fill_carried([&](const CollectivePlugin::State& state, int rank, float* out) {
    checkpoint.read_carried(rank, state.name, out);
  });
  return "";
}

}  // namespace

RestoreReport restore(Engine& engine, Checkpoint& checkpoint, RestoreOptions options) {
  RestoreReport report = compare(engine, checkpoint, options);
  const auto there = [&](const nn::Parameter& parameter) { return find(checkpoint, parameter.name()) != nullptr; };
  engine.fill([&](const nn::Parameter& parameter, nn::ElementRange range,
                  float* out) { checkpoint.read(parameter.name(), Checkpoint::kValue, range, out); },
              there);
  if (!options.optimizer) {
    engine.fill_carried({});
    return report;
  }
  engine.set_trained_since([&](const nn::Parameter& parameter) {
    const CheckpointTensor* const tensor = find(checkpoint, parameter.name());
    return tensor == nullptr ? std::uint64_t{0} : tensor->trained_since;
  });
  engine.fill_states([&](const nn::Parameter& parameter, int state, nn::ElementRange range,
                         float* out) { checkpoint.read(parameter.name(), state, range, out); },
                     there);
  report.dropped = restore_carried(engine, checkpoint);
  engine.set_steps(checkpoint.step());
  return report;
}

}  // namespace tessera::fsdp
