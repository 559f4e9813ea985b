// The collective plug-ins of an engine, and state that only one rank holds.
#include <algorithm>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

/// A collective, the name of its plug-in, and the instance.
struct CollectiveBinding {
  OpKind collective;
  const std::string& name;
  CollectivePlugin& plugin;
};

std::vector<CollectiveBinding> carriers(const Strategy& strategy, EngineResources& fabric) {
  return {{OpKind::all_gather, strategy.all_gather, *fabric.all_gather},
          {OpKind::reduce_scatter, strategy.reduce_scatter, *fabric.reduce_scatter},
          {OpKind::all_reduce, strategy.all_reduce, *fabric.all_reduce}};
}

}  // namespace

void Engine::prepare_collectives() {
  for (std::size_t i = 0; i < units_.size(); ++i)
    for (const Precision& precision : units_[i]->precisions())
      validate_collectives(strategies_[i], fabric_->mesh.shape(), precision, options_.collectives);
  const CollectiveCapabilities gathers = fabric_->all_gather->capabilities();
  fabric_->exact_gathers = gathers.exact;
  fabric_->carries_encodings = gathers.carries_encodings();
  for (const CollectiveBinding& carrier : carriers(options_.strategy, *fabric_)) {
    std::vector<TransferSpec> transfers;
    for (const auto& unit : units_)
      for (TransferSpec& transfer : unit->transfers_of(carrier.collective)) transfers.push_back(std::move(transfer));
    carrier.plugin.prepare({carrier.collective, model_.context(), *fabric_->buffers, transfers});
  }
}

void Engine::make_collectives() {
  const Strategy& strategy = options_.strategy;
  const CollectiveRegistry& registry = options_.collectives;
  fabric_->all_gather = registry.make(OpKind::all_gather, strategy.all_gather);
  fabric_->reduce_scatter = registry.make(OpKind::reduce_scatter, strategy.reduce_scatter);
  fabric_->all_reduce = registry.make(OpKind::all_reduce, strategy.all_reduce);
  prepare_collectives();
}

std::vector<CollectivePlugin::State> Engine::plugin_state() {
  std::vector<CollectivePlugin::State> all;
  for (const CollectiveBinding& carrier : carriers(options_.strategy, *fabric_))
    for (CollectivePlugin::State& state : carrier.plugin.state()) {
      state.name = std::string(comm::name_of(carrier.collective)) + ":" + carrier.name + "/" + state.name;
      all.push_back(std::move(state));
    }
  const std::size_t of_plugins = all.size();
  for (const auto& unit : units_) unit->add_replica_state(all);
  for (std::size_t i = of_plugins; i < all.size(); ++i) all[i].name = "replica/" + all[i].name;
  return all;
}

void Engine::clear_plugin_state() {
  Stream& stream = fabric_->compute();
  stream.wait(fabric_->reduce_stream->record());  // where plug-ins use it
  for (const CollectiveBinding& carrier : carriers(options_.strategy, *fabric_)) carrier.plugin.clear_state(stream);
}

void Engine::load_plugin_state(const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill) {
  begin_values();
  if (!fill) {
    clear_plugin_state();
    for (const auto& unit : units_) unit->set_anchor();
  } else {
    fabric_->compute().synchronize();  // the host may write over what the stream's work reads
    for (const CollectivePlugin::State& state : plugin_state())
      nn::upload(model_.context(), state.data, state.count * sizeof(float),
                 [&](void* out) { fill(state, fabric_->mesh.rank(), static_cast<float*>(out)); });
    for (const auto& unit : units_) unit->publish_replica_state();
  }
  publish_values();
}

CollectiveStats Engine::collective_stats(OpKind collective) const {
  for (const CollectiveBinding& carrier : carriers(options_.strategy, *fabric_)) {
    if (carrier.collective != collective) continue;
    CollectiveStats stats = carrier.plugin.stats();
    if (collective == OpKind::all_gather) {
      stats.raw += fabric_->encodings_sent;
      stats.sent += fabric_->encodings_sent;
    }
    return stats;
  }
  throw InvalidUsage("collective_stats: an engine has no " + std::string(comm::name_of(collective)));
}

}  // namespace tessera::fsdp
