// The transfers of a unit's collectives, known in advance so that plug-ins can allocate memory.
#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

using comm::OpKind;

std::vector<TransferSpec> ParamGroup::transfers_of(OpKind collective) const {
  const ShardingPlan& plan = plan_;
  std::vector<TransferSpec> planned;
  const auto add = [&](const FlatParameter& flat, const Axis& axis, DType dtype, std::int64_t elements) {
    std::string each = name() + "/" + axis;
    if (flats_.size() > 1) each += "/" + std::to_string(&flat - flats_.data());
    planned.push_back({std::move(each), &flat.layout, dtype, elements, fabric_.mesh.shape().size_of(axis)});
  };
  for (const FlatParameter& flat : flats_) {
    const std::int64_t padded = flat.layout.padded;
    if (collective == OpKind::all_gather) {
      if (flat.encoded() && !fabric_.carries_encodings) continue;
      for (std::size_t i = 0; i < plan.gather_axes.size(); ++i)
        add(flat, plan.gather_axes[i], flat.layout.dtype, plan.unsharded(padded, i + 1).count());
      for (std::size_t i = 0; flat.layout.trainable && i < plan.gather_after_step.size(); ++i)
        add(flat, plan.gather_after_step[i], flat.layout.dtype, plan.after_gathers(padded, i + 1).count());
      continue;
    }
    if (!flat.layout.trainable) continue;
    if (plan.periodic && plan.periodic->replicas > 1 && collective == OpKind::all_reduce)
      add(flat, plan.periodic->axis, DType::f32, flat.optimized.count());
    std::int64_t elements = padded;
    for (const ReduceStage& stage : plan.reductions) {
      if (stage.scatter == (collective == OpKind::reduce_scatter))
        add(flat, stage.axis, flat.precision.reduce, elements);
      if (stage.scatter) elements /= fabric_.mesh.shape().size_of(stage.axis);
    }
  }
  return planned;
}

std::vector<Precision> ParamGroup::precisions() const {
  std::vector<Precision> all;
  for (const FlatParameter& flat : flats_)
    if (flat.layout.trainable) all.push_back(flat.precision);
  return all;
}

}  // namespace tessera::fsdp
