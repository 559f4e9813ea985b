// Restores a checkpoint into an engine of any shape.
#include <algorithm>

#include "tessera/fsdp/checkpoint.h"

namespace tessera::fsdp {
namespace {

std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kMax = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kMax); ++i) text += (i == 0 ? "'" : ", '") + names[i] + "'";
  if (names.size() > kMax) text += " and " + std::to_string(names.size() - kMax) + " more";
  return text;
}

template <class Entry>
const Entry* find(const std::vector<Entry>& all, const std::string& name) {
  const auto found =
      std::lower_bound(all.begin(), all.end(), name, [](const Entry& e, const std::string& n) { return e.name < n; });
  return found != all.end() && found->name == name ? &*found : nullptr;
}

template <class Entry>
void add_unexpected(const std::vector<Entry>& there, std::vector<std::string> known, RestoreReport& report) {
  std::sort(known.begin(), known.end());
  for (const Entry& entry : there)
    if (!std::binary_search(known.begin(), known.end(), entry.name)) report.unexpected.push_back(entry.name);
}

void compare_buffers(const Module& model, const Checkpoint& checkpoint, RestoreReport& report) {
  std::vector<std::string> names;
  for (const auto& buffer : model.buffers()) {
    if (!buffer->persistent()) continue;
    names.push_back(buffer->name());
    const CheckpointBuffer* const saved = find(checkpoint.buffers(), buffer->name());
    const auto text = [](DType dtype, const Shape& shape) {
      return std::string(name_of(dtype)) + " " + to_string(shape);
    };
    if (saved == nullptr) {
      report.missing.push_back(buffer->name());
    } else if (saved->shape != buffer->shape() || saved->dtype != buffer->dtype()) {
      throw InvalidUsage(checkpoint.directory() + ": buffer '" + saved->name + "' is " +
                         text(saved->dtype, saved->shape) + ", the model's " + text(buffer->dtype(), buffer->shape()));
    }
  }
  add_unexpected(checkpoint.buffers(), std::move(names), report);
}

/// Throws unless the optimizer keeps as many states per element as that of the checkpoint.
void compare_optimizer(Engine& engine, const Checkpoint& checkpoint) {
  for (const auto& parameter : engine.state().parameters()) {
    const CheckpointTensor* const tensor = find(checkpoint.tensors(), parameter->name());
    if (tensor != nullptr && parameter->requires_grad() && tensor->states != engine.state().optimizer_slots())
      throw InvalidUsage(checkpoint.directory() + ": the optimizer kept " + std::to_string(tensor->states) +
                         " values for each element of '" + tensor->name + "', this one keeps " +
                         std::to_string(engine.state().optimizer_slots()) +
                         "; use the optimizer that it was written with");
  }
}

/// Plug-in state belongs to a rank: it is restored if every rank finds the state that it had; otherwise all ranks start
/// with cleared state.
std::string restore_plugin_state(Engine& engine, Checkpoint& checkpoint) {
  std::vector<Checkpoint::PluginStateEntry> expected;
  for (const CollectivePlugin::State& state : engine.state().plugin_state())
    expected.push_back({state.name, state.count});
  std::sort(expected.begin(), expected.end());
  const int ranks = engine.mesh().shape().size();
  bool fits = checkpoint.ranks() == ranks, has_some = false;
  for (int rank = 0; rank < checkpoint.ranks(); ++rank) {
    const std::vector<Checkpoint::PluginStateEntry> found = checkpoint.plugin_state(rank);
    has_some = has_some || !found.empty();
    fits = fits && found == expected;
  }
  if (!fits) {
    engine.state().load_plugin_state({});
    if (expected.empty() && !has_some) return "";
    return checkpoint.directory() +
           ": has no plug-in state for this world, strategy and choice of collectives, which therefore starts empty" +
           (checkpoint.replicas_apart().value_or(false)
                ? "; the replicas had trained on their own since their last sync, from whose parameters they go on"
                : "");
  }
  engine.state().load_plugin_state([&](const CollectivePlugin::State& state, int rank, float* out) {
    checkpoint.read_plugin_state(rank, state.name, out);
  });
  return "";
}

}  // namespace

RestoreReport compare(const Module& model, const Checkpoint& checkpoint, const RestoreOptions& options) {
  RestoreReport report;
  std::vector<std::string> names;
  for (const auto& parameter : model.parameters()) {
    names.push_back(parameter->name());
    const CheckpointTensor* tensor = find(checkpoint.tensors(), parameter->name());
    if (tensor == nullptr) {
      report.missing.push_back(parameter->name());
    } else if (tensor->shape != parameter->shape()) {
      throw InvalidUsage(checkpoint.directory() + ": '" + tensor->name + "' has shape " + to_string(tensor->shape) +
                         ", the model's " + to_string(parameter->shape()));
    }
  }
  add_unexpected(checkpoint.tensors(), std::move(names), report);
  compare_buffers(model, checkpoint, report);
  const auto required = [&](std::vector<std::string> all) {
    if (options.optional_buffers) std::erase_if(all, options.optional_buffers);
    return all;
  };
  const std::vector<std::string> missing = required(report.missing), unexpected = required(report.unexpected);
  if (!options.strict || (missing.empty() && unexpected.empty())) return report;
  std::string text = checkpoint.directory() + ": does not match the model:";
  if (!missing.empty()) text += " it lacks " + listed(missing);
  if (!unexpected.empty()) text += std::string(missing.empty() ? "" : ";") + " the model has no " + listed(unexpected);
  throw InvalidUsage(text);
}

RestoreReport restore(Engine& engine, Checkpoint& checkpoint, RestoreOptions options) {
  if (options.optimizer) compare_optimizer(engine, checkpoint);
  RestoreReport report = compare(engine.model().root(), checkpoint, options);
  const auto there = [&](const Parameter& parameter) {
    return find(checkpoint.tensors(), parameter.name()) != nullptr;
  };
  engine.state().load([&](const Parameter& parameter, ElementRange range,
                          float* out) { checkpoint.read(parameter.name(), Checkpoint::kValue, range, out); },
                      there);
  engine.state().load_buffers(
      [&](const ModuleBuffer& buffer, void* out) {
        checkpoint.read_buffer(buffer.name(), {static_cast<std::byte*>(out), buffer.bytes()});
      },
      [&](const ModuleBuffer& buffer) {
        return buffer.persistent() && find(checkpoint.buffers(), buffer.name()) != nullptr;
      });
  if (!options.optimizer) {
    engine.state().load_plugin_state({});
    return report;
  }
  engine.state().set_trained_since([&](const Parameter& parameter) {
    const CheckpointTensor* const tensor = find(checkpoint.tensors(), parameter.name());
    return tensor == nullptr ? std::uint64_t{0} : tensor->trained_since;
  });
  engine.state().load_optimizer_state([&](const Parameter& parameter, int state, ElementRange range,
                                          float* out) { checkpoint.read(parameter.name(), state, range, out); },
                                      there);
  report.dropped = restore_plugin_state(engine, checkpoint);
  engine.state().set_steps(checkpoint.step(), 0, checkpoint.replicas_apart());
  return report;
}

}  // namespace tessera::fsdp
