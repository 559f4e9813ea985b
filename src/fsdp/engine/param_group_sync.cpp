// Replicas with a sync period: they train independently and then synchronize.
//
// Each replica sends its f32 delta from the anchor. The mean delta is the gradient of an outer SGD step from the
// anchor, which all replicas apply identically (Stich, "Local SGD", ICLR 2019; Douillard et al., DiLoCo, arXiv
// 2311.08105). Their optimizer states stay separate.
#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

void ParamGroup::start_sync() {
  Stream& stream = fabric_.compute();
  nn::KernelTable<float>& kernels = fabric_.context.kernels<float>("period");
  std::vector<FlatTransfer> transfers;
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const auto count = static_cast<std::size_t>(flat.optimized.count());
    flat.delta = fabric_.gradients->acquire(count * sizeof(float), name(), stream);
    auto* const delta = static_cast<float*>(flat.delta.data());
    kernels.scale(stream, {flat.optimized_values(), -1.0F, delta, count, false});
    kernels.add(stream, {FlatParameter::f32_of(flat.anchor, 0), delta, delta, count});
    const comm::View view{delta, count, DType::f32, fabric_.device()};
    transfers.push_back({view, view, &flat.layout});
  }
  const ShardingPlan::SyncPlan& period = *plan_.periodic;
  if (period.replicas == 1) return;
  Stream& reduce = *fabric_.reduce_stream;
  reduce.wait(stream.record());
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::reduce_issue, name(), bytes(), reduce);
  reductions_ = fabric_.all_reduce->run({*fabric_.mesh.channels(period.axis).reduce,
                                         transfers,
                                         comm::ReduceOp::average_over(period.replicas),
                                         {.after = &reduce, .label = name()},
                                         fabric_.copier});
  fabric_.recorder.end(span, reduce);
}

void ParamGroup::finish_sync() {
  Stream& stream = fabric_.compute();
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::reduce_wait, name(), bytes(), stream);
  reductions_.wait_on(stream);
  fabric_.recorder.end(span, stream);
  const OuterOptimizer& outer = plan_.periodic->outer;
  const nn::OptimizerConfig config{.kind = nn::OptimizerConfig::Kind::sgd,
                                   .weight_decay = 0,
                                   .momentum = outer.momentum,
                                   .nesterov = outer.nesterov};
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    nn::OptimizerRange range{.values = FlatParameter::f32_of(flat.anchor, 0),
                             .gradients = static_cast<const float*>(flat.delta.data()),
                             .count = flat.optimized.count(),
                             .decay = false};
    if (flat.outer_momentum) range.state[0] = FlatParameter::f32_of(flat.outer_momentum, 0);
    if (flat.masters) range.narrow = {flat.layout.dtype, nullptr, flat.value_of(flat.optimized.begin)};
    // The momentum begins as zeros: no sync counts as a first step, which would set it.
    nn::update(fabric_.context, config, {.number = 2, .learning_rate = outer.learning_rate}, range);
    flat.delta.give_back(stream.record());
    fabric_.context.kernels<float>("period").assign(
        stream, {range.values, flat.optimized_values(), static_cast<std::size_t>(range.count), false});
  }
}

void ParamGroup::set_anchor() {
  Stream& stream = fabric_.compute();
  for (FlatParameter& flat : flats_) {
    if (!flat.anchor) continue;
    const auto count = static_cast<std::size_t>(flat.optimized.count());
    fabric_.context.kernels<float>("period").assign(
        stream, {flat.optimized_values(), FlatParameter::f32_of(flat.anchor, 0), count, false});
    if (flat.outer_momentum) fabric_.zero(stream, flat.outer_momentum.data(), flat.outer_momentum.bytes());
  }
}

void ParamGroup::add_replica_state(std::vector<CollectivePlugin::State>& all) const {
  for (const FlatParameter& flat : flats_) {
    if (!flat.anchor) continue;
    const std::string each = name() + "/" + std::to_string(&flat - flats_.data()) + "/";
    const auto add = [&](const std::string& what, float* data) {
      all.push_back({each + what, data, static_cast<std::size_t>(flat.optimized.count())});
    };
    add("value", flat.optimized_values());
    for (std::size_t i = 0; i < flat.state.size(); ++i)
      add("state" + std::to_string(i), FlatParameter::f32_of(flat.state[i], 0));
    add("anchor", FlatParameter::f32_of(flat.anchor, 0));
    if (flat.outer_momentum) add("outer_momentum", FlatParameter::f32_of(flat.outer_momentum, 0));
  }
}

void ParamGroup::publish_replica_state() {
  for (FlatParameter& flat : flats_)
    if (flat.anchor && flat.masters)
      fabric_.context.device_kernels().convert(
          fabric_.compute(), {flat.optimized_values(), DType::f32, flat.value_of(flat.optimized.begin),
                              flat.layout.dtype, static_cast<std::size_t>(flat.optimized.count())});
}

}  // namespace tessera::fsdp
