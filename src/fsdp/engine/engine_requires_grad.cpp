// Parameters that begin or cease to be trained between two steps: rebuilds the layout of their units.
#include <algorithm>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

void Engine::apply_requires_grad() {
  if (gradients_ != Gradients::none)
    throw InvalidUsage("apply_requires_grad: between a backward and its step; call step() or abort_step() first");
  std::string what = "apply_requires_grad with nothing frozen";
  for (const auto& unit : units_)
    for (const auto& parameter : unit->spec().parameters)
      if (parameter->tensor().requires_grad()) {
        if (parameter->dtype() == DType::u8)
          throw InvalidUsage("apply_requires_grad: " + parameter->name() +
                             " is an encoding, which can't be trained; leave it without requires_grad");
      } else {
        if (what.ends_with("nothing frozen")) what = "apply_requires_grad with frozen";
        what += " " + parameter->name();
      }
  agree(what);
  orders_agreed_ = false;
  if (units_.front()->plan().periodic)
    throw Unsupported("apply_requires_grad: strategy " + options_.strategy.name +
                      " has a period, whose replicas would lose what each has of its own");
  begin_values();
  bool rebuilt = false;
  for (const auto& unit : units_)
    if (unit->outdated()) {
      unit->rebuild(steps_ - skipped_steps_);
      rebuilt = true;
    }
  // plug-ins refer to flat parameters that no longer exist; their state is dropped, too
  if (rebuilt) make_collectives();
  if (options_.cpu_offload) reserve_pieces();
  if (measures_norm()) prepare_norm();
  publish_values();
}

std::uint64_t Engine::trained_since(const nn::Parameter& parameter) const {
  for (const auto& unit : units_)
    if (const std::uint64_t step = unit->trained_since(parameter)) return step;
  return 0;
}

void Engine::set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step) {
  for (const auto& unit : units_) unit->set_trained_since(step);
}

std::uint64_t ParamGroup::trained_since(const nn::Parameter& parameter) const {
  const auto found = trained_since_.find(&parameter);
  return found == trained_since_.end() ? 0 : found->second;
}

void ParamGroup::set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step) {
  for (const auto& parameter : spec_.parameters) trained_since_[parameter.get()] = step(*parameter);
  for (FlatParameter& flat : flats_)
    if (flat.layout.trainable) find_runs(flat);
}

bool ParamGroup::outdated() const {
  for (const FlatParameter& flat : flats_)
    for (const FlatEntry& entry : flat.layout.entries)
      if (entry.parameter->tensor().requires_grad() != flat.layout.trainable) return true;
  return false;
}

/// Full values and optimizer states of every parameter, in host memory.
ParamGroup::Whole ParamGroup::download_all() {
  Whole whole;
  const auto download = [&](const nn::Parameter& parameter, const float* from) {
    std::vector<float>& to = whole[&parameter].emplace_back(static_cast<std::size_t>(parameter.count()));
    nn::download(fabric_.context, from, to.size() * sizeof(float),
                 [&](const void* values) { std::copy_n(static_cast<const float*>(values), to.size(), to.data()); });
  };
  gather_full();
  for (const auto& parameter : spec_.parameters)
    download_values(*parameter, [&](std::span<const float> values) {
      whole[parameter.get()].emplace_back(values.begin(), values.end());
    });
  close_values();
  for (FlatParameter& flat : flats_) {
    if (flat.state.empty()) continue;
    flat.shown = fabric_.allocate(static_cast<std::size_t>(flat.layout.padded) * sizeof(float), MemoryCategory::other);
    for (const Buffer& state : flat.state) {
      gather_part(flat, FlatParameter::f32_of(state, 0));
      for (const FlatEntry& entry : flat.layout.entries)
        download(*entry.parameter, FlatParameter::f32_of(flat.shown, entry.offset));
    }
    flat.shown = Buffer();
  }
  return whole;
}

void ParamGroup::rebuild(std::uint64_t steps) {
  const Whole whole = download_all();
  for (const FlatParameter& flat : flats_)
    for (const FlatEntry& entry : flat.layout.entries) {
      const nn::Parameter* const parameter = entry.parameter.get();
      if (parameter->tensor().requires_grad() && !flat.layout.trainable) trained_since_[parameter] = steps;
    }
  flats_.clear();
  state_ = State::sharded;
  lay_out();
  const auto copy = [&](const nn::Parameter& parameter, std::size_t what, ElementRange range, float* out) {
    std::copy_n(whole.at(&parameter)[what].data() + range.begin, range.count(), out);
  };
  load([&](const nn::Parameter& parameter, ElementRange range, float* out) { copy(parameter, 0, range, out); }, {});
  load_optimizer_state([&](const nn::Parameter& parameter, int state, ElementRange range,
                           float* out) { copy(parameter, static_cast<std::size_t>(state) + 1, range, out); },
                       [&](const nn::Parameter& parameter) { return whole.at(&parameter).size() > 1; });
}

}  // namespace tessera::fsdp
