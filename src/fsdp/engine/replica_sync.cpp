#include "tessera/fsdp/engine/replica_sync.h"

namespace tessera::fsdp {

void ReplicaSync::start_sync() {
  Stream& stream = resources_.compute();
  std::vector<FlatTransfer> transfers;
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const auto count = static_cast<std::size_t>(flat.optimized.count());
    flat.delta = resources_.gradients.acquire(count * sizeof(float), group_.name(), stream);
    auto* const delta = static_cast<float*>(flat.delta.data());
    resources_.runtime.subtract(stream, FlatParameter::f32_at(flat.anchor, 0), flat.optimized_values(), delta, count);
    const comm::View view{delta, count, DType::f32, resources_.device()};
    transfers.push_back({view, view, &flat.layout});
  }
  const ShardingPlan::SyncPlan& period = *group_.plan().periodic;
  if (period.replicas == 1) return;
  Stream& reduce = *resources_.reduce_stream;
  reduce.wait(stream.record());
  const TraceRecorder::Span span =
      resources_.trace.begin(TraceEventKind::reduce_issue, group_.name(), group_.bytes(), reduce);
  reductions_ = resources_.collectives.all_reduce().run({*resources_.mesh.channels(period.axis).reduce,
                                                         transfers,
                                                         comm::ReduceOp::average_over(period.replicas),
                                                         {.after = &reduce, .label = group_.name()},
                                                         resources_.copier});
  resources_.trace.end(span, reduce);
}

void ReplicaSync::finish_sync() {
  Stream& stream = resources_.compute();
  const TraceRecorder::Span span =
      resources_.trace.begin(TraceEventKind::reduce_wait, group_.name(), group_.bytes(), stream);
  reductions_.wait_on(stream);
  resources_.trace.end(span, stream);
  const OuterOptimizer& outer = group_.plan().periodic->outer;
  const OptimizerConfig config{
      .kind = OptimizerConfig::Kind::sgd, .weight_decay = 0, .momentum = outer.momentum, .nesterov = outer.nesterov};
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    OptimizerRange range{.values = FlatParameter::f32_at(flat.anchor, 0),
                         .gradients = static_cast<const float*>(flat.delta.data()),
                         .count = flat.optimized.count(),
                         .decay = false};
    if (flat.outer_momentum) range.state[0] = FlatParameter::f32_at(flat.outer_momentum, 0);
    if (flat.master_weights) range.half = {flat.layout.dtype, nullptr, flat.value_at(flat.optimized.begin)};
    // The momentum begins as zeros: no sync counts as a first step, which would set it.
    resources_.runtime.update(config, {.number = 2, .learning_rate = outer.learning_rate}, range);
    flat.delta.release(stream.record());
    resources_.runtime.assign(stream, DType::f32, range.values, flat.optimized_values(),
                              static_cast<std::size_t>(range.count), false);
  }
}

void ReplicaSync::set_anchor() {
  Stream& stream = resources_.compute();
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.anchor) continue;
    const auto count = static_cast<std::size_t>(flat.optimized.count());
    resources_.runtime.assign(stream, DType::f32, flat.optimized_values(), FlatParameter::f32_at(flat.anchor, 0), count,
                              false);
    if (flat.outer_momentum) resources_.zero(stream, flat.outer_momentum.data(), flat.outer_momentum.bytes());
  }
}

void ReplicaSync::add_state(std::vector<CollectivePlugin::State>& all) const {
  for (const FlatParameter& flat : group_.flats()) {
    if (!flat.anchor) continue;
    const std::string each = group_.name() + "/" + std::to_string(&flat - group_.flats().data()) + "/";
    const auto add = [&](const std::string& what, float* data) {
      all.push_back({each + what, data, static_cast<std::size_t>(flat.optimized.count())});
    };
    add("value", flat.optimized_values());
    for (std::size_t i = 0; i < flat.state.size(); ++i)
      add("state" + std::to_string(i), FlatParameter::f32_at(flat.state[i], 0));
    add("anchor", FlatParameter::f32_at(flat.anchor, 0));
    if (flat.outer_momentum) add("outer_momentum", FlatParameter::f32_at(flat.outer_momentum, 0));
  }
}

void ReplicaSync::publish_state() {
  for (FlatParameter& flat : group_.flats())
    if (flat.anchor && flat.master_weights)
      resources_.runtime.convert(resources_.compute(), flat.optimized_values(), DType::f32,
                                 flat.value_at(flat.optimized.begin), flat.layout.dtype,
                                 static_cast<std::size_t>(flat.optimized.count()));
}

void ReplicaSync::reset() {
  reductions_ = WorkChain();
  for (FlatParameter& flat : group_.flats())
    if (flat.delta) flat.delta.release(Event());
}

}  // namespace tessera::fsdp
