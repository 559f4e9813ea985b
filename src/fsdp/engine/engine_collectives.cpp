#include "tessera/fsdp/engine/engine_collectives.h"

namespace tessera::fsdp {

using comm::OpKind;

void EngineCollectives::create(const CollectiveRegistry& registry, const Strategy& strategy) {
  for (Binding& binding : bindings_) {
    binding.name = strategy.*binding.name_in;
    binding.plugin = registry.make(binding.collective, binding.name);
  }
  const CollectiveCapabilities gathers = all_gather().capabilities();
  exact_gathers_ = gathers.exact;
  gathers_quantized_ = gathers.gathers_quantized();
}

void EngineCollectives::prepare(Runtime& runtime, LeasePool& buffers,
                                const std::function<std::vector<TransferSpec>(OpKind)>& transfers) {
  for (const Binding& binding : bindings_) {
    const std::vector<TransferSpec> all = transfers(binding.collective);
    binding.plugin->prepare({binding.collective, runtime, buffers, all});
  }
}

std::vector<CollectivePlugin::State> EngineCollectives::state() {
  std::vector<CollectivePlugin::State> all;
  for (const Binding& binding : bindings_)
    for (CollectivePlugin::State& state : binding.plugin->state()) {
      state.name = std::string(comm::name_of(binding.collective)) + ":" + binding.name + "/" + state.name;
      all.push_back(std::move(state));
    }
  return all;
}

void EngineCollectives::clear_state(Stream& stream) {
  for (const Binding& binding : bindings_) binding.plugin->clear_state(stream);
}

CollectiveStats EngineCollectives::stats(OpKind collective) const {
  for (const Binding& binding : bindings_) {
    if (binding.collective != collective) continue;
    CollectiveStats stats = binding.plugin->stats();
    if (collective == OpKind::all_gather) {
      stats.raw += quantized_bytes_;
      stats.sent += quantized_bytes_;
    }
    return stats;
  }
  throw InvalidUsage("collective_stats: the engine has no " + std::string(comm::name_of(collective)) +
                     "; pass all_gather, reduce_scatter or all_reduce");
}

}  // namespace tessera::fsdp
