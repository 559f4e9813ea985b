#include "tessera/fsdp/engine/unit_runtime.h"

namespace tessera::fsdp {

UnitRuntime::UnitRuntime(EngineResources& resources, UnitSpec spec, Strategy own_strategy, ShardingPlan plan,
                         int optimizer_slots)
    : strategy(std::move(own_strategy)),
      group(resources, std::move(spec), std::move(plan), optimizer_slots),
      reducer(resources, group),
      optimizer(resources, group, reducer),
      sync(resources, group),
      state(resources, group) {}

void UnitRuntime::lay_out_again(std::uint64_t steps) {
  const GroupState::FullState full = state.download_all();
  optimizer.begin_training_of_unfrozen(steps);
  group.lay_out();
  optimizer.lay_out();
  state.load_all(full);
}

void UnitRuntime::reset() {
  reducer.reset();
  sync.reset();
  for (FlatParameter& flat : group.flats()) flat.full_values = Buffer();
  group.reset();
}

}  // namespace tessera::fsdp
