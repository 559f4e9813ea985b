// A unit's step: the optimizer's update of its shard, and the gathers that follow.
#include <algorithm>

#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

void ParamGroup::update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step) {
  Stream& stream = fabric_.compute();
  CpuOffload* const offload = fabric_.offload.get();
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::optimizer_step, name(), bytes(), stream);
  if (offload != nullptr) offload->up().wait(gradients_stored_);
  for (FlatParameter& flat : flats_)
    for (const FlatParameter::UpdateRange& run : flat.runs) {
      nn::OptimizerStep own = step;
      own.number -= run.since;
      const std::int64_t most = offload == nullptr ? run.range.count() : fabric_.offload_chunk_elements;
      for (std::int64_t begin = run.range.begin; begin < run.range.end; begin += most)
        update_part(flat, {{begin, std::min(begin + most, run.range.end)}, run.decay, run.since}, config, own);
    }
  if (offload != nullptr) stored_ = offload->down().record();
  fabric_.recorder.end(span, stream);
}

void ParamGroup::all_gather_updated() {
  updated_ = fabric_.compute().record();
  gather_updated();
}

void ParamGroup::update_part(FlatParameter& flat, const FlatParameter::UpdateRange& part,
                             const nn::OptimizerConfig& config, const nn::OptimizerStep& step) {
  CpuOffload* const offload = fabric_.offload.get();
  if (offload != nullptr) offload->begin_piece();
  const nn::OptimizerRange range = optimizer_range(flat, part);
  if (offload != nullptr) offload->arrive();
  nn::update(fabric_.context, config, step, range);
  if (offload != nullptr) offload->start_write_back();
}

/// The buffers that an update of a range reads and writes: at rest, or in a piece on the device.
nn::OptimizerRange ParamGroup::optimizer_range(FlatParameter& flat, const FlatParameter::UpdateRange& part) {
  const ShardingPlan::OffloadedState& offloaded = plan_.offloaded;
  const std::int64_t first = part.range.begin;
  const auto count = static_cast<std::size_t>(part.range.count());
  const auto updated = [&](void* at, bool with_host) {
    return static_cast<float*>(with_host ? fabric_.offload->exchange(at, count * sizeof(float)) : at);
  };
  nn::OptimizerRange range{.count = part.range.count(), .decay = part.decay};
  if (flat.precision.has_master_weights()) {
    void* const values = flat.value_of(first);
    range.values = updated(flat.master_of(first), offloaded.optimizer);
    range.narrow = {flat.layout.dtype, nullptr,
                    offloaded.parameters ? fabric_.offload->place(values, count * size_of(flat.layout.dtype)) : values};
  } else {
    range.values = updated(flat.value_of(first), offloaded.parameters);
  }
  const void* gradient = flat.gradient_of(first);
  if (offloaded.gradients) gradient = fabric_.offload->bring(gradient, count * size_of(flat.precision.reduce));
  if (flat.precision.reduce == DType::f32) {
    range.gradients = static_cast<const float*>(gradient);
  } else {
    range.narrow.gradient = gradient;
  }
  for (std::size_t i = 0; i < flat.state.size(); ++i)
    range.state[i] = updated(FlatParameter::f32_of(flat.state[i], first - flat.optimized.begin), offloaded.optimizer);
  return range;
}

std::size_t ParamGroup::piece_bytes() const {
  std::size_t most = 0;
  for (const FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const auto count = static_cast<std::size_t>(std::min(flat.optimized.count(), fabric_.offload_chunk_elements));
    const std::size_t f32 = CpuOffload::room_of(count * sizeof(float));  // of values, gradients and each state
    const std::size_t narrow =
        flat.precision.has_master_weights() ? CpuOffload::room_of(count * size_of(flat.layout.dtype)) : 0;
    most = std::max(most, (2 + flat.state.size()) * f32 + narrow);
  }
  return most;
}

void ParamGroup::gather_updated() {
  const std::vector<Axis>& axes = plan_.gather_after_step;
  if (axes.empty()) return;
  Stream& stream = *fabric_.gather_stream;
  stream.wait(updated_);
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::unshard_issue, name(), bytes(), stream);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    std::vector<FlatTransfer> transfers;
    for (FlatParameter& flat : flats_) {
      if (!flat.layout.trainable) continue;
      const ElementRange part = plan_.after_gathers(flat.layout.padded, i);
      const ElementRange whole = plan_.after_gathers(flat.layout.padded, i + 1);
      const auto view = [&](ElementRange range) {
        return comm::View{flat.value_of(range.begin), static_cast<std::size_t>(range.count()), flat.layout.dtype,
                          fabric_.device()};
      };
      transfers.push_back({view(part), view(whole), &flat.layout});
    }
    if (i > 0) gathers_.wait_on(stream);  // an outer axis gathers what the inner one has completed
    gathers_ = fabric_.all_gather->run(
        {*fabric_.mesh.channels(axes[i]).gather, transfers, {}, {.after = &stream, .label = name()}, fabric_.copier});
  }
  fabric_.recorder.end(span, stream);
  state_ = plan_.unshards_to_lease ? State::sharded : State::gathering;
}

void ParamGroup::clear_optimizer() {
  for (FlatParameter& flat : flats_)
    for (Buffer& state : flat.state) {
      if (plan_.offloaded.optimizer) {
        std::fill_n(state.bytes_at(0), state.bytes(), std::byte{0});
      } else {
        fabric_.zero(fabric_.compute(), state.data(), state.bytes());
      }
    }
}

}  // namespace tessera::fsdp
