// Replicas with a sync period: they train independently and then synchronize.
//
// Each replica sends its f32 delta from the anchor. The mean delta is the gradient of an outer SGD step from the
// anchor, which all replicas apply identically (Stich, "Local SGD", ICLR 2019; Douillard et al., DiLoCo, arXiv
// 2311.08105). Their optimizer states stay separate.
#pragma once

#include <vector>

#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

/// The periodic synchronization of one parameter group; no effect on one without a sync period. Methods are
/// asynchronous with respect to the host.
class TESSERA_API ReplicaSync {
 public:
  /// `resources` and `group` outlive the object.
  ReplicaSync(EngineResources& resources, ParamGroup& group) : resources_(resources), group_(group) {}
  ReplicaSync(const ReplicaSync&) = delete;
  ReplicaSync& operator=(const ReplicaSync&) = delete;

  void start_sync();   ///< sends the parameter deltas since the anchor; the plan has a sync period
  void finish_sync();  ///< applies the outer optimizer
  void set_anchor();   ///< sets the anchor to the current values, which are the same on all replicas
  /// Appends the state that only this replica holds, including its anchor and outer momentum.
  void add_state(std::vector<CollectivePlugin::State>& all) const;
  void publish_state();  ///< call after that state was written
  void reset();          ///< drops a sync in flight, after an error

 private:
  EngineResources& resources_;
  ParamGroup& group_;
  WorkChain reductions_;
};

}  // namespace tessera::fsdp
