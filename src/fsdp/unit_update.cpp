// What happens to a unit after backward: norms, the optimizer's step, and values from outside.
#include <cstring>

#include "tessera/fsdp/unit.h"
#include "tessera/nn/kernels/elementwise.h"

namespace tessera::fsdp {

std::size_t Unit::square_sum_slots() const {
  std::size_t slots = 0;
  for (const Flat& flat : flats_)
    if (flat.layout.trainable) slots += static_cast<std::size_t>(fabric_.mesh.size());
  return slots;
}

void Unit::add_square_sums(double* slots) const {
  const int world = fabric_.mesh.size();
  for (const Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const std::int64_t length = flat.layout.padded / world;
    for (int i = 0; i < world; ++i, ++slots) {
      const ElementRange slice = {length * i, length * (i + 1)};
      if (slice.begin < flat.optimized.begin || slice.end > flat.optimized.end) continue;
      fabric_.compute().run(
          [slots, from = flat.gradient_of(slice.begin), length, &threads = fabric_.context.threads()] {
            *slots = nn::kernels::sum_of_squares(threads, from, static_cast<std::size_t>(length));
          });
    }
  }
}

void Unit::update(const nn::OptimizerConfig& config, const nn::OptimizerStep& step) {
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::optimizer_step, name(), bytes(), stream);
  for (Flat& flat : flats_) {
    for (const Flat::Run& run : flat.runs) {
      nn::OptimizerRange range{.values = flat.value_of(run.range.begin),
                               .gradients = flat.gradient_of(run.range.begin),
                               .count = run.range.count(),
                               .decay = run.decay};
      for (std::size_t i = 0; i < flat.state.size(); ++i)
        range.state[i] = reinterpret_cast<float*>(flat.at(flat.state[i].data(), flat.optimized, run.range.begin));
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
      transfers.push_back({{flat.value_of(part.begin), static_cast<std::size_t>(part.count()), flat.layout.dtype},
                           {flat.value_of(whole.begin), static_cast<std::size_t>(whole.count()), flat.layout.dtype}});
    }
    if (i > 0) gathers_.wait_on(stream);  // an outer axis gathers what the inner one has completed
    gathers_ = fabric_.all_gather->run(
        {*fabric_.mesh.channels(axes[i]).gather, transfers, {}, {.after = &stream, .label = name()}, fabric_.copier});
  }
  fabric_.recorder.end(span, stream);
  state_ = fabric_.plan.gather_axis ? State::sharded : State::gathering;
}

void Unit::fill(const Fill& fill) {
  for (Flat& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, flat.rest);
      if (range.count() > 0) fill(*entry.parameter, range, flat.value_of(entry.offset + range.begin));
    }
  }
}

void Unit::clear_optimizer() {
  for (Flat& flat : flats_)
    for (Buffer& state : flat.state) std::memset(state.data(), 0, state.bytes());
}

}  // namespace tessera::fsdp
