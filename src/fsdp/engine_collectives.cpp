// Which plug-ins carry an engine's collectives, and whether they fit.
#include <algorithm>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/unit.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

/// A collective, the name of what carries it, and the instance.
struct Carrier {
  OpKind collective;
  const std::string& name;
  CollectivePlugin& plugin;
  std::string title() const { return std::string(comm::name_of(collective)) + " by " + name; }
};

std::vector<Carrier> carriers(const Strategy& strategy, Fabric& fabric) {
  return {{OpKind::all_gather, strategy.all_gather, *fabric.all_gather},
          {OpKind::reduce_scatter, strategy.reduce_scatter, *fabric.reduce_scatter},
          {OpKind::all_reduce, strategy.all_reduce, *fabric.all_reduce}};
}

void require_fit(const Carrier& carrier, const CollectiveCapabilities& can, const PlannedTransfer& transfer,
                 const std::string& strategy) {
  if (!can.dtypes.empty() && std::find(can.dtypes.begin(), can.dtypes.end(), transfer.dtype) == can.dtypes.end()) {
    std::string known;
    for (const DType dtype : can.dtypes) known += " " + std::string(name_of(dtype));
    throw Unsupported(carrier.title() + ": of " + std::string(name_of(transfer.dtype)) + " (" + transfer.name +
                      "), and it takes" + known + "; choose another, or another precision");
  }
  if (can.whole && transfer.elements != transfer.flat->padded)
    throw Unsupported(carrier.title() + ": needs whole flat parameters, and under strategy " + strategy + " " +
                      transfer.name + " carries a shard of one; choose another");
}

}  // namespace

void Engine::prepare_collectives() {
  const Strategy& strategy = options_.strategy;
  for (const Carrier& carrier : carriers(strategy, *fabric_)) {
    const CollectiveCapabilities can = carrier.plugin.capabilities();
    std::vector<PlannedTransfer> transfers;
    for (const auto& unit : units_)
      for (PlannedTransfer& transfer : unit->transfers_of(carrier.collective)) {
        require_fit(carrier, can, transfer, strategy.name);
        transfers.push_back(std::move(transfer));
      }
    if (carrier.collective == OpKind::all_gather) {
      fabric_->exact_gathers = can.exact;
      // [Note: gathers that round] They may write over parameters only where those are kept elsewhere: as f32 masters,
      // or at rest. Here the owner would go on from its own values and the others from rounded ones; and were the
      // owner's rounded too, updates smaller than the rounding would be lost.
      for (const auto& unit : units_)
        if (!can.exact && !fabric_->plan.gather_after_step.empty() && unit->updates_in_place())
          throw InvalidUsage(carrier.title() + ": it rounds, and under strategy " + strategy.name +
                             " the parameters that it gathers after the step are the only ones there are; use 16-bit "
                             "precision, which keeps f32 masters, or a strategy that shards parameters at rest");
    }
    carrier.plugin.prepare({carrier.collective, model_.context(), *fabric_->buffers, transfers});
  }
}

std::vector<CollectivePlugin::State> Engine::carried() {
  std::vector<CollectivePlugin::State> all;
  for (const Carrier& carrier : carriers(options_.strategy, *fabric_))
    for (CollectivePlugin::State& state : carrier.plugin.state()) {
      state.name = std::string(comm::name_of(carrier.collective)) + ":" + carrier.name + "/" + state.name;
      all.push_back(std::move(state));
    }
  return all;
}

void Engine::clear_carried() {
  Stream& stream = fabric_->compute();
  stream.wait(fabric_->reduce_stream->record());  // where plug-ins use it
  for (const Carrier& carrier : carriers(options_.strategy, *fabric_)) carrier.plugin.clear_state(stream);
}

void Engine::fill_carried(const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill) {
  begin_values();
  if (!fill) {
    clear_carried();
  } else {
    fabric_->compute().synchronize();  // the host may write over what the stream's work reads
    for (const CollectivePlugin::State& state : carried())
      nn::upload(model_.context(), state.data, state.count * sizeof(float),
                 [&](void* out) { fill(state, fabric_->mesh.rank(), static_cast<float*>(out)); });
  }
  publish_values();
}

CollectiveStats Engine::collective_stats(OpKind collective) const {
  for (const Carrier& carrier : carriers(options_.strategy, *fabric_))
    if (carrier.collective == collective) return carrier.plugin.stats();
  throw InvalidUsage("collective_stats: an engine has no " + std::string(comm::name_of(collective)));
}

}  // namespace tessera::fsdp
