// A unit's step: the optimizer's update of its shard, and the gathers that follow.
#include "tessera/fsdp/unit.h"

namespace tessera::fsdp {

void Unit::update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step) {
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::optimizer_step, name(), bytes(), stream);
  for (Flat& flat : flats_) {
    for (const Flat::Run& run : flat.runs) {
      const std::int64_t first = run.range.begin;
      nn::OptimizerRange range{.count = run.range.count(), .decay = run.decay};
      if (flat.precision.masters()) {
        range.values = flat.master_of(first);
        range.narrow = {flat.layout.dtype, nullptr, flat.value_of(first)};
      } else {
        range.values = static_cast<float*>(flat.value_of(first));
      }
      if (flat.precision.reduce == DType::f32) {
        range.gradients = static_cast<const float*>(flat.gradient_of(first));
      } else {
        range.narrow.gradient = flat.gradient_of(first);
      }
      for (std::size_t i = 0; i < flat.state.size(); ++i)
        range.state[i] = Flat::f32_of(flat.state[i], first - flat.optimized.begin);
      nn::update(fabric_.context, config, step, range);
    }
  }
  fabric_.recorder.end(span, stream);
  fabric_.gather_stream->wait(stream.record());
  gather_updated();
}

void Unit::gather_updated() {
  const std::vector<Axis>& axes = fabric_.plan.gather_after_step;
  if (axes.empty()) return;
  Stream& stream = *fabric_.gather_stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_issue, name(), bytes(), stream);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    std::vector<Transfer> transfers;
    for (Flat& flat : flats_) {
      if (!flat.layout.trainable) continue;
      const ElementRange part = fabric_.plan.after_gathers(flat.layout.padded, i);
      const ElementRange whole = fabric_.plan.after_gathers(flat.layout.padded, i + 1);
      const auto view = [&](ElementRange range) {
        return comm::View{flat.value_of(range.begin), static_cast<std::size_t>(range.count()), flat.layout.dtype,
                          fabric_.device()};
      };
      transfers.push_back({view(part), view(whole)});
    }
    if (i > 0) gathers_.wait_on(stream);  // an outer axis gathers what the inner one has completed
    gathers_ = fabric_.all_gather->run(
        {*fabric_.mesh.channels(axes[i]).gather, transfers, {}, {.after = &stream, .label = name()}, fabric_.copier});
  }
  fabric_.recorder.end(span, stream);
  state_ = fabric_.plan.gather_axis ? State::sharded : State::gathering;
}

void Unit::clear_optimizer() {
  for (Flat& flat : flats_)
    for (Buffer& state : flat.state) fabric_.zero(fabric_.compute(), state.data(), state.bytes());
}

}  // namespace tessera::fsdp
