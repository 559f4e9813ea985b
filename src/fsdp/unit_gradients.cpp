// A unit's gradients: from where a backward writes them to what is kept of them.
#include "tessera/fsdp/unit.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::fsdp {

void Unit::bind_gradients(Flat& flat, void* base) {
  for (const FlatEntry& entry : flat.layout.entries)
    entry.parameter->gradient().bind(Flat::at(base, flat.layout.dtype, entry.offset), false);
}

void Unit::begin_gradients() {
  if (has_gradients_) return;
  Stream& stream = fabric_.compute();
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    if (!flat.leases_gradient(fabric_.plan)) {
      bind_gradients(flat, flat.gradient.data());
      continue;
    }
    Lease& lease = flat.precision.casts() ? flat.written_gradient : flat.full_gradient;
    lease = fabric_.gradients->acquire(flat.layout.bytes(), name(), stream);
    const DType dtype = flat.layout.dtype;
    for (const ElementRange gap : flat.layout.gaps())
      fabric_.zero(stream, Flat::at(lease.data(), dtype, gap.begin),
                   static_cast<std::size_t>(gap.count()) * size_of(dtype));
    bind_gradients(flat, lease.data());
  }
  has_gradients_ = true;
}

/// What the backward wrote, in the type of the reduction: into the kept buffer, or a lease where a part is kept.
void Unit::cast_gradients(Flat& flat) {
  Stream& stream = fabric_.compute();
  void* to = flat.gradient.data();
  if (fabric_.plan.gradient_sharded) {
    flat.full_gradient = fabric_.gradients->acquire(flat.reduced_bytes(), name(), stream);
    to = flat.full_gradient.data();
  }
  fabric_.context.device_kernels().convert(stream,
                                           {flat.written_gradient.data(), flat.layout.dtype, to, flat.precision.reduce,
                                            static_cast<std::size_t>(flat.layout.padded)});
  flat.written_gradient.give_back(stream.record());
}

void Unit::reduce_issue() {
  begin_gradients();
  stage_input_.clear();
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    for (const FlatEntry& entry : flat.layout.entries) {
      nn::Gradient& gradient = entry.parameter->gradient();
      if (!gradient.written()) {  // an unused parameter: its gradient is zero, not what the memory held before
        const nn::GradientTarget target = gradient.write();
        fabric_.zero(fabric_.compute(), target.tensor.raw(), target.tensor.bytes());
      }
      gradient.unbind();
    }
    if (flat.written_gradient) cast_gradients(flat);
    stage_input_.push_back({0, flat.layout.padded});
  }
  has_gradients_ = false;
  stage_ = 0;
  if (fabric_.plan.reductions.empty()) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(fabric_.compute().record());
    start_stage();
  }
}

CollectivePlugin& Unit::plugin_for(const ReduceStage& stage) {
  return stage.scatter ? *fabric_.reduce_scatter : *fabric_.all_reduce;
}

std::vector<Transfer> Unit::stage_transfers(const ReduceStage& stage) {
  const Mesh& mesh = fabric_.mesh;
  std::vector<Transfer> transfers;
  std::size_t index = 0;
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    ElementRange& range = stage_input_[index++];
    // Full gradients are leased until a stage has put a part of them into the kept buffer.
    const bool leased = static_cast<bool>(flat.full_gradient);
    void* from = leased ? flat.leased_gradient_of(range.begin) : flat.gradient_of(range.begin);
    const auto count = static_cast<std::size_t>(range.count());
    void* to = from;
    std::size_t out_count = count;
    if (stage.scatter) {
      const std::int64_t part = range.count() / mesh.shape().size_of(stage.axis);
      const std::int64_t begin = range.begin + part * mesh.coordinate(stage.axis);
      range = {begin, begin + part};
      out_count = static_cast<std::size_t>(part);
      to = leased && !stage.to_kept ? flat.leased_gradient_of(begin) : flat.gradient_of(begin);
    }
    const DType dtype = flat.precision.reduce;
    transfers.push_back(
        {{from, count, dtype, fabric_.device()}, {to, out_count, dtype, fabric_.device()}, &flat.layout});
  }
  return transfers;
}

void Unit::start_stage() {
  const ReduceStage& stage = fabric_.plan.reductions[stage_];
  Stream& stream = *fabric_.reduce_stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::reduce_issue, name(), bytes(), stream);
  const std::vector<Transfer> transfers = stage_transfers(stage);
  reductions_ = plugin_for(stage).run({*fabric_.mesh.channels(stage.axis).reduce,
                                       transfers,
                                       stage.op,
                                       {.after = &stream, .label = name()},
                                       fabric_.copier});
  fabric_.recorder.end(span, stream);
}

void Unit::reduce_continue() {
  if (!reducing()) return;
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::reduce_wait, name(), bytes(), stream);
  const bool more = reductions_.advance(stream);
  fabric_.recorder.end(span, stream);
  if (more) return;
  if (fabric_.plan.reductions[stage_].to_kept)
    for (Flat& flat : flats_)
      if (flat.full_gradient) flat.full_gradient.give_back(stream.record());
  if (++stage_ == fabric_.plan.reductions.size()) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(stream.record());
    start_stage();
  }
}

void Unit::finish_reduction() {
  stage_ = kIdle;
  if (squares_ != nullptr) sum_squares();
  if (fabric_.plan.offloaded.gradients) store_gradients();
}

/// This rank's part goes from the lease to the host. The step before is done with the host's copy: what the compute
/// stream has got to comes after that step's updates, and they after their gradients' way up.
void Unit::store_gradients() {
  Stream& down = fabric_.offload->down();
  down.wait(fabric_.compute().record());
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const std::int64_t first = flat.optimized.begin;
    fabric_.copier.download(down, flat.gradient_of(first), flat.leased_gradient_of(first),
                            static_cast<std::size_t>(flat.optimized.count()) * size_of(flat.precision.reduce));
  }
  gradients_stored_ = down.record();
  for (Flat& flat : flats_)
    if (flat.full_gradient) flat.full_gradient.give_back(gradients_stored_);
}

std::size_t Unit::square_sum_slots() const {
  std::size_t slots = 0;
  for (const Flat& flat : flats_)
    if (flat.layout.trainable) slots += static_cast<std::size_t>(fabric_.mesh.size());
  return slots;
}

void Unit::sum_squares() {
  const int world = fabric_.mesh.size();
  double* slot = squares_;
  for (const Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const std::int64_t length = flat.layout.padded / world;
    for (int i = 0; i < world; ++i, ++slot) {
      const ElementRange slice = {length * i, length * (i + 1)};
      if (slice.begin < flat.optimized.begin || slice.end > flat.optimized.end) continue;
      nn::ops::for_floating("norm", flat.precision.reduce, [&](auto zero) {
        using T = decltype(zero);
        fabric_.context.kernels<T>("norm").sum_of_squares(fabric_.compute(),
                                                          static_cast<const T*>(flat.reduced_gradient_of(slice.begin)),
                                                          static_cast<std::size_t>(length), slot);
      });
    }
  }
}

}  // namespace tessera::fsdp
