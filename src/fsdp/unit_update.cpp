// A unit's step: the optimizer's update of its shard, and the gathers that follow.
#include <algorithm>

#include "tessera/fsdp/unit.h"

namespace tessera::fsdp {

void Unit::update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step) {
  Stream& stream = fabric_.compute();
  Offload* const offload = fabric_.offload.get();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::optimizer_step, name(), bytes(), stream);
  if (offload != nullptr) offload->up().wait(gradients_stored_);
  for (Flat& flat : flats_)
    for (const Flat::Run& run : flat.runs) {
      nn::OptimizerStep own = step;
      own.number -= run.since;
      const std::int64_t most = offload == nullptr ? run.range.count() : fabric_.offload_piece;
      for (std::int64_t begin = run.range.begin; begin < run.range.end; begin += most)
        update_part(flat, {{begin, std::min(begin + most, run.range.end)}, run.decay, run.since}, config, own);
    }
  if (offload != nullptr) stored_ = offload->down().record();
  fabric_.recorder.end(span, stream);
}

void Unit::publish_update() {
  fabric_.gather_stream->wait(fabric_.compute().record());
  gather_updated();
}

void Unit::update_part(Flat& flat, const Flat::Run& part, const nn::OptimizerConfig& config,
                       const nn::OptimizerStep& step) {
  Offload* const offload = fabric_.offload.get();
  if (offload != nullptr) offload->begin_piece();
  const nn::OptimizerRange range = optimizer_range(flat, part);
  if (offload != nullptr) offload->arrive();
  nn::update(fabric_.context, config, step, range);
  if (offload != nullptr) offload->depart();
}

/// Where the update finds and leaves what belongs to a part: at rest, or in a piece on the device.
nn::OptimizerRange Unit::optimizer_range(Flat& flat, const Flat::Run& part) {
  const Plan::Offloaded& offloaded = plan_.offloaded;
  const std::int64_t first = part.range.begin;
  const auto count = static_cast<std::size_t>(part.range.count());
  const auto updated = [&](void* at, bool with_host) {
    return static_cast<float*>(with_host ? fabric_.offload->exchange(at, count * sizeof(float)) : at);
  };
  nn::OptimizerRange range{.count = part.range.count(), .decay = part.decay};
  if (flat.precision.masters()) {
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
    range.state[i] = updated(Flat::f32_of(flat.state[i], first - flat.optimized.begin), offloaded.optimizer);
  return range;
}

std::size_t Unit::piece_bytes() const {
  std::size_t most = 0;
  for (const Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const auto count = static_cast<std::size_t>(std::min(flat.optimized.count(), fabric_.offload_piece));
    const std::size_t f32 = Offload::room_of(count * sizeof(float));  // of values, gradients and each state
    const std::size_t narrow = flat.precision.masters() ? Offload::room_of(count * size_of(flat.layout.dtype)) : 0;
    most = std::max(most, (2 + flat.state.size()) * f32 + narrow);
  }
  return most;
}

void Unit::gather_updated() {
  const std::vector<Axis>& axes = plan_.gather_after_step;
  if (axes.empty()) return;
  Stream& stream = *fabric_.gather_stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_issue, name(), bytes(), stream);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    std::vector<Transfer> transfers;
    for (Flat& flat : flats_) {
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
  state_ = plan_.leases_parameters ? State::sharded : State::gathering;
}

void Unit::clear_optimizer() {
  for (Flat& flat : flats_)
    for (Buffer& state : flat.state) {
      if (plan_.offloaded.optimizer) {
        std::fill_n(state.bytes_at(0), state.bytes(), std::byte{0});
      } else {
        fabric_.zero(fabric_.compute(), state.data(), state.bytes());
      }
    }
}

}  // namespace tessera::fsdp
