// The gradients of a unit, from the backward that writes them to the gradients that are kept.
#include <algorithm>

#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::fsdp {

void ParamGroup::bind_gradients(FlatParameter& flat, void* base, bool keep) {
  for (const FlatEntry& entry : flat.layout.entries)
    entry.parameter->gradient().bind(FlatParameter::at(base, flat.layout.dtype, entry.offset), keep);
}

/// False: gradients are reduced in the kept buffer, which holds full gradients and is still empty.
bool ParamGroup::reduces_in_lease() const { return plan_.gradient_sharded || accumulated_; }

void ParamGroup::prepare_gradients() {
  if (has_gradients_) return;
  Stream& stream = fabric_.compute();
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const bool casts = flat.precision.casts();
    if (!casts && !reduces_in_lease()) {
      bind_gradients(flat, flat.gradient.data(), held_);
      continue;
    }
    Lease& lease = casts ? flat.written_gradient : flat.full_gradient;
    const bool keep = held_ && !casts;
    if (!keep) {
      lease = fabric_.gradients->acquire(flat.layout.bytes(), name(), stream);
      const DType dtype = flat.layout.dtype;
      for (const ElementRange gap : flat.layout.gaps())
        fabric_.zero(stream, FlatParameter::at(lease.data(), dtype, gap.begin),
                     static_cast<std::size_t>(gap.count()) * size_of(dtype));
    }
    bind_gradients(flat, lease.data(), keep);
  }
  has_gradients_ = true;
  note_leases();
}

/// Converts what the backward wrote to the reduce dtype: into the kept buffer, or a lease.
void ParamGroup::cast_gradients(FlatParameter& flat) {
  Stream& stream = fabric_.compute();
  const auto count = static_cast<std::size_t>(flat.layout.padded);
  const auto convert_to = [&](void* to) {
    fabric_.context.device_kernels().convert(
        stream, {flat.written_gradient.data(), flat.layout.dtype, to, flat.precision.reduce, count});
    flat.written_gradient.give_back(stream.record());
  };
  if (held_) {
    Lease converted = fabric_.gradients->acquire(flat.reduced_bytes(), name(), stream);
    convert_to(converted.data());
    add_gradients(flat, converted.data(), flat.reduced_gradient_of(0), count);
    converted.give_back(stream.record());
    return;
  }
  if (reduces_in_lease()) flat.full_gradient = fabric_.gradients->acquire(flat.reduced_bytes(), name(), stream);
  note_leases();
  convert_to(flat.reduced_gradient_of(0));
}

/// to += from, in the reduce dtype.
void ParamGroup::add_gradients(const FlatParameter& flat, const void* from, void* to, std::size_t count) {
  nn::ops::for_floating("gradients", flat.precision.reduce, [&](auto zero) {
    using T = decltype(zero);
    fabric_.context.kernels<T>("gradients")
        .assign(fabric_.compute(), {static_cast<const T*>(from), static_cast<T*>(to), count, true});
  });
}

/// Called once a backward has written its gradients.
void ParamGroup::end_writing(FlatParameter& flat) {
  for (const FlatEntry& entry : flat.layout.entries) {
    nn::Gradient& gradient = entry.parameter->gradient();
    if (!gradient.written()) {  // an unused parameter: its gradient is zero, not what the memory held before
      const nn::GradientTarget target = gradient.write();
      fabric_.zero(fabric_.compute(), target.tensor.raw(), target.tensor.bytes());
    }
    gradient.unbind();
  }
  if (flat.written_gradient) cast_gradients(flat);
}

void ParamGroup::start_reduction(bool last) {
  last_ = last;
  stages_ = last ? plan_.reductions.size() : plan_.reduced_each;
  if (!last && stages_ == 0 && !has_gradients_) return;  // the unit was not used, and no rank waits for its zeros
  prepare_gradients();
  stage_input_.clear();
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    end_writing(flat);
    stage_input_.push_back({0, flat.layout.padded});
  }
  has_gradients_ = false;
  held_ = !last && stages_ == 0;
  if (held_) return;
  stage_ = 0;
  if (stages_ == 0) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(fabric_.compute().record());
    start_stage();
  }
}

CollectivePlugin& ParamGroup::plugin_for(const ReduceStage& stage) {
  return stage.scatter ? *fabric_.reduce_scatter : *fabric_.all_reduce;
}

std::vector<FlatTransfer> ParamGroup::stage_transfers(const ReduceStage& stage) {
  const Mesh& mesh = fabric_.mesh;
  std::vector<FlatTransfer> transfers;
  std::size_t index = 0;
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    ElementRange& range = stage_input_[index++];
    // Full gradients are leased until a stage has written a shard of them to the kept buffer.
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
      const bool in_place = leased && (!stage.to_kept || accumulated_);
      to = in_place ? flat.leased_gradient_of(begin) : flat.gradient_of(begin);
    }
    const DType dtype = flat.precision.reduce;
    transfers.push_back(
        {{from, count, dtype, fabric_.device()}, {to, out_count, dtype, fabric_.device()}, &flat.layout});
  }
  return transfers;
}

/// A sum that the last stage divides. If gradients are reduced in f16, whose largest number is 65504, every stage
/// divides its summands: then no intermediate sum is larger than the largest gradient.
comm::ReduceOp ParamGroup::op_of(const ReduceStage& stage) const {
  const bool narrow = std::any_of(flats_.begin(), flats_.end(), [](const FlatParameter& flat) {
    return flat.layout.trainable && flat.precision.reduce == DType::f16;
  });
  return narrow ? comm::ReduceOp::premul_sum(1.0 / fabric_.mesh.shape().size_of(stage.axis)) : stage.op;
}

void ParamGroup::start_stage() {
  const ReduceStage& stage = plan_.reductions[stage_];
  Stream& stream = *fabric_.reduce_stream;
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::reduce_issue, name(), bytes(), stream);
  const std::vector<FlatTransfer> transfers = stage_transfers(stage);
  reductions_ = plugin_for(stage).run({*fabric_.mesh.channels(stage.axis).reduce,
                                       transfers,
                                       op_of(stage),
                                       {.after = &stream, .label = name()},
                                       fabric_.copier});
  fabric_.recorder.end(span, stream);
}

void ParamGroup::advance_reduction() {
  if (!reducing()) return;
  Stream& stream = fabric_.compute();
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::reduce_wait, name(), bytes(), stream);
  const bool more = reductions_.advance(stream);
  fabric_.recorder.end(span, stream);
  if (more) return;
  if (plan_.reductions[stage_].to_kept && !accumulated_)
    for (FlatParameter& flat : flats_)
      if (flat.full_gradient) flat.full_gradient.give_back(stream.record());
  ++stage_;
  if (accumulated_ && stage_ == plan_.reduced_each) add_earlier_microbatches();
  if (stage_ == stages_) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(stream.record());
    start_stage();
  }
}

/// Adds this microbatch's reduced gradients in the lease to the kept ones of earlier microbatches. The sum is in the
/// kept buffer, or in the lease if kept gradients are offloaded.
void ParamGroup::add_earlier_microbatches() {
  Stream& stream = fabric_.compute();
  std::size_t index = 0;
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const ElementRange range = stage_input_[index++];
    const auto count = static_cast<std::size_t>(range.count());
    void* const kept = flat.gradient_of(range.begin);
    void* const leased = flat.leased_gradient_of(range.begin);
    if (!plan_.offloaded.gradients) {
      add_gradients(flat, leased, kept, count);
      flat.full_gradient.give_back(stream.record());
      continue;
    }
    Stream& up = fabric_.offload->up();
    const std::size_t bytes = count * size_of(flat.precision.reduce);
    Lease earlier = fabric_.gradients->acquire(bytes, name(), up);
    up.wait(gradients_stored_);
    fabric_.copier.upload(up, earlier.data(), kept, bytes);
    stream.wait(up.record());
    add_gradients(flat, earlier.data(), leased, count);
    earlier.give_back(stream.record());
  }
}

void ParamGroup::finish_reduction() {
  stage_ = kIdle;
  accumulated_ = !last_;
  if (last_ && norm_parts_ != nullptr) find_norm_parts();
  if (plan_.offloaded.gradients) store_gradients();
}

/// Copies this rank's shard from the lease to the host. The previous step no longer uses the host's copy: the compute
/// stream is past that step's updates, and those came after the upload of their gradients.
void ParamGroup::store_gradients() {
  Stream& down = fabric_.offload->down();
  down.wait(fabric_.compute().record());
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const std::int64_t first = flat.optimized.begin;
    fabric_.copier.download(down, flat.gradient_of(first), flat.leased_gradient_of(first),
                            static_cast<std::size_t>(flat.optimized.count()) * size_of(flat.precision.reduce));
  }
  gradients_stored_ = down.record();
  for (FlatParameter& flat : flats_)
    if (flat.full_gradient) flat.full_gradient.give_back(gradients_stored_);
}

void ParamGroup::for_each_gradient(const std::function<void(const GradientShard&)>& visit) {
  for (FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, flat.optimized);
      if (range.count() == 0) continue;
      visit({.parameter = *entry.parameter,
             .range = range,
             .dtype = flat.precision.reduce,
             .data = flat.gradient_of(entry.offset + range.begin),
             .offloaded = plan_.offloaded.gradients});
    }
  }
}

std::size_t ParamGroup::norm_slots() const {
  std::size_t slots = 0;
  for (const FlatParameter& flat : flats_)
    if (flat.layout.trainable) slots += static_cast<std::size_t>(fabric_.mesh.size());
  return slots;
}

void ParamGroup::find_norm_parts() {
  const int world = fabric_.mesh.size();
  double* slot = norm_parts_;
  for (const FlatParameter& flat : flats_) {
    if (!flat.layout.trainable) continue;
    const std::int64_t length = flat.layout.padded / world;
    const ElementRange own = narrow({0, flat.layout.padded}, norm_cuts_);
    for (int i = 0; i < world; ++i, ++slot) {
      const ElementRange slice = {length * i, length * (i + 1)};
      if (slice.begin < own.begin || slice.end > own.end) continue;
      nn::ops::for_floating("norm", flat.precision.reduce, [&](auto zero) {
        using T = decltype(zero);
        fabric_.context.kernels<T>("norm").norm_part(fabric_.compute(), norm_,
                                                     static_cast<const T*>(flat.reduced_gradient_of(slice.begin)),
                                                     static_cast<std::size_t>(length), slot);
      });
    }
  }
}

}  // namespace tessera::fsdp
