#include "tessera/fsdp/sharded_state.h"

#include <algorithm>
#include <map>
#include <string>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine/engine_core.h"

namespace tessera::fsdp {

void ShardedState::initialize(std::uint64_t seed) {
  core_.begin_writing_values();
  for (const auto& unit : core_.units) {
    unit->state.initialize(seed);
    unit->optimizer.clear();
    unit->sync.set_anchor();
  }
  core_.buffers->initialize(seed);
  core_.clear_plugin_state();
  core_.replicas_apart = false;
  core_.publish_values();
  set_steps(0);
}

void ShardedState::initialize(std::uint64_t seed, const ParameterLoader& own, const ParameterFilter& wanted) {
  initialize(seed);
  load(own, wanted);
}

void ShardedState::load(const ParameterLoader& fill, const ParameterFilter& wanted) {
  core_.begin_writing_values();
  for (const auto& unit : core_.units) {
    unit->state.load(fill, wanted);
    unit->sync.set_anchor();
  }
  core_.publish_values();
}

void ShardedState::broadcast_from(int from, const ParameterLoader& fill, const ParameterFilter& wanted) {
  comm::HostCollectives& host = core_.order->host();
  if (from < 0 || from >= host.size())
    throw InvalidUsage("broadcast_from: there is no rank " + std::to_string(from) + "; pass 0 to " +
                       std::to_string(host.size() - 1));
  core_.agree("broadcast_from rank " + std::to_string(from));
  core_.begin_writing_values();
  for (const auto& unit : core_.units) {
    std::map<const Parameter*, std::vector<float>> whole;
    for (const auto& parameter : unit->group.spec().parameters) {
      if (wanted && !wanted(*parameter)) continue;
      std::vector<float>& values = whole[parameter.get()];
      values.resize(static_cast<std::size_t>(parameter->count()));
      if (host.rank() == from) fill(*parameter, {0, parameter->count()}, values.data());
      if (host.size() == 1) continue;
      const comm::View view = comm::view_of(values.data(), values.size());
      host.exchange(view, view, [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
        options.label = parameter->name();
        return host.communicator().broadcast(in, out, from, options);
      });
    }
    unit->state.load([&](const Parameter& parameter, ElementRange range,
                         float* out) { std::copy_n(whole.at(&parameter).data() + range.begin, range.count(), out); },
                     wanted);
  }
  core_.buffers->broadcast(from);
  core_.publish_values();
}

std::vector<std::shared_ptr<Parameter>> ShardedState::parameters() const {
  std::vector<std::shared_ptr<Parameter>> all;
  for (const auto& unit : core_.units)
    all.insert(all.end(), unit->group.spec().parameters.begin(), unit->group.spec().parameters.end());
  return all;
}

void ShardedState::for_each_parameter(const ParameterVisitor& visitor) {
  std::vector<std::pair<const Parameter*, GroupState*>> items;
  for (const auto& unit : core_.units)
    for (const auto& parameter : unit->group.spec().parameters) items.emplace_back(parameter.get(), &unit->state);
  std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.first->name() < b.first->name(); });
  core_.resources.join_offload();
  GroupState* full = nullptr;
  for (const auto& [parameter, state] : items) {
    if (state != full) {
      if (full != nullptr) full->release_full();
      full = state;
      full->gather_full();
    }
    full->download(*parameter, [&, &visited = *parameter](std::span<const float> values) { visitor(visited, values); });
  }
  if (full != nullptr) full->release_full();
}

void ShardedState::for_each_shard(const std::function<void(const ShardRange&)>& visitor) {
  core_.begin_writing_values();
  for (const auto& unit : core_.units) unit->state.for_each_shard(visitor);
}

void ShardedState::load_optimizer_state(const OptimizerLoader& fill, const ParameterFilter& wanted) {
  core_.begin_writing_values();
  for (const auto& unit : core_.units) unit->state.load_optimizer_state(fill, wanted);
}

int ShardedState::optimizer_slots() const { return core_.options.optimizer_slots(); }

std::uint64_t ShardedState::trained_since(const Parameter& parameter) const {
  for (const auto& unit : core_.units)
    if (const std::uint64_t step = unit->optimizer.trained_since(parameter)) return step;
  return 0;
}

void ShardedState::set_trained_since(const std::function<std::uint64_t(const Parameter&)>& step) {
  for (const auto& unit : core_.units) unit->optimizer.set_trained_since(step);
}

void ShardedState::set_steps(std::uint64_t steps, std::uint64_t skipped, std::optional<bool> apart) {
  if (skipped > steps)
    throw InvalidUsage("set_steps: " + std::to_string(skipped) + " skipped steps of " + std::to_string(steps) +
                       "; at most all of them can have been skipped");
  if (apart)
    core_.replicas_apart = *apart && core_.sync_period() > 1;
  else if (steps != core_.steps)
    core_.replicas_apart = steps % core_.sync_period() != 0;
  core_.steps = steps;
  core_.skipped_steps = skipped;
}

bool ShardedState::replicas_apart() const { return core_.replicas_apart; }

const std::vector<std::shared_ptr<ModuleBuffer>>& ShardedState::buffers() const { return core_.buffers->all(); }

void ShardedState::load_buffers(const std::function<void(const ModuleBuffer&, void* out)>& fill,
                                const std::function<bool(const ModuleBuffer&)>& wanted) {
  core_.buffers->load(fill, wanted);
}

void ShardedState::synchronize_buffers() {
  if (core_.options.buffers == BufferSync::maximum) core_.buffers->synchronize(BufferSync::maximum);
}

std::vector<CollectivePlugin::State> ShardedState::plugin_state() {
  std::vector<CollectivePlugin::State> all = core_.resources.collectives.state();
  const std::size_t of_plugins = all.size();
  for (const auto& unit : core_.units) unit->sync.add_state(all);
  for (std::size_t i = of_plugins; i < all.size(); ++i) all[i].name = "replica/" + all[i].name;
  return all;
}

void ShardedState::load_plugin_state(
    const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill) {
  core_.begin_writing_values();
  if (!fill) {
    core_.clear_plugin_state();
    for (const auto& unit : core_.units) unit->sync.set_anchor();
  } else {
    core_.resources.compute().synchronize();  // the host may write over what the stream's work reads
    for (const CollectivePlugin::State& state : plugin_state())
      core_.resources.runtime.upload(state.data, state.count * sizeof(float), [&](void* out) {
        fill(state, core_.resources.mesh.rank(), static_cast<float*>(out));
      });
    for (const auto& unit : core_.units) unit->sync.publish_state();
  }
  core_.publish_values();
}

}  // namespace tessera::fsdp
