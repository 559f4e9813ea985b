#include "tessera/fsdp/engine/grad_reducer.h"

#include <algorithm>

// Where a unit's gradients lie in a step of several microbatches, by Sync::when of the axes that are reduced. "Full" is
// a buffer of all the unit's gradients; "kept" is what the strategy keeps from backward to step(): all or a shard.
//
//              microbatch 1                      microbatch 2 ..                    the last one
//   every      full -> reduced into kept         full -> reduced in a lease,        as before it
//                                                added to kept
//   last       stays full                        added to full by the kernels       full -> reduced into kept
//   scatter    full -> scattered into kept       scattered in a lease, added        then the other axes reduce kept
//
// `every` needs no more memory than one microbatch and sends everything each time; `last` sends once and holds full
// gradients until then (Accumulated::in_full); `scatter` is between the two, for replicas of shards. The first
// reduction writes to the kept buffer, because it is empty; later ones write to the lease, because a reduction
// overwrites its output and kept gradients must stay (Accumulated::in_kept).
//
// With another dtype for reductions than for computation there is one buffer more: the backward writes in the model's
// dtype to a lease, which is converted when it ends. A sum over microbatches is then made in the reduce dtype.
//
// A unit that a backward did not use is reduced as zeros, since other ranks may have used it; with `last` it is left
// alone until the last backward, for then no rank waits for it.
namespace tessera::fsdp {

/// False: gradients are reduced in the kept buffer, which holds full gradients and is still empty.
bool GradReducer::reduces_in_lease() const {
  return group_.plan().gradient_sharded || accumulated_ == Accumulated::in_kept;
}

void GradReducer::prepare_gradients() {
  if (state_ == State::writing) return;
  Stream& stream = resources_.compute();
  const bool held = accumulated_ == Accumulated::in_full;
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const bool casts = flat.precision.casts();
    if (!casts && !reduces_in_lease()) {
      flat.bind_gradients(flat.gradient.data(), held);
      continue;
    }
    Lease& lease = casts ? flat.written_gradient : flat.full_gradient;
    const bool keep = held && !casts;
    if (!keep) {
      lease = resources_.gradients.acquire(flat.layout.bytes(), group_.name(), stream);
      const DType dtype = flat.layout.dtype;
      for (const ElementRange gap : flat.layout.gaps())
        resources_.zero(stream, FlatParameter::at(lease.data(), dtype, gap.begin),
                        static_cast<std::size_t>(gap.count()) * size_of(dtype));
    }
    flat.bind_gradients(lease.data(), keep);
  }
  state_ = State::writing;
  group_.update_peak_bytes();
}

/// Converts what the backward wrote to the reduce dtype: into the kept buffer, or a lease.
void GradReducer::cast_gradients(FlatParameter& flat) {
  Stream& stream = resources_.compute();
  const auto count = static_cast<std::size_t>(flat.layout.padded);
  const auto convert_to = [&](void* to) {
    resources_.runtime.convert(stream, flat.written_gradient.data(), flat.layout.dtype, to, flat.precision.reduce,
                               count);
    flat.written_gradient.release(stream.record());
  };
  if (accumulated_ == Accumulated::in_full) {
    Lease converted = resources_.gradients.acquire(flat.reduced_bytes(), group_.name(), stream);
    convert_to(converted.data());
    add_gradients(flat, converted.data(), flat.reduced_gradient_at(0), count);
    converted.release(stream.record());
    return;
  }
  if (reduces_in_lease())
    flat.full_gradient = resources_.gradients.acquire(flat.reduced_bytes(), group_.name(), stream);
  group_.update_peak_bytes();
  convert_to(flat.reduced_gradient_at(0));
}

/// to += from, in the reduce dtype.
void GradReducer::add_gradients(const FlatParameter& flat, const void* from, void* to, std::size_t count) {
  resources_.runtime.assign(resources_.compute(), flat.precision.reduce, from, to, count, true);
}

/// Called once a backward has written its gradients.
void GradReducer::end_writing(FlatParameter& flat) {
  for (const FlatEntry& entry : flat.layout.entries) {
    if (!entry.parameter->gradient_written())  // unused: its gradient is zero, not what the memory held before
      resources_.zero(resources_.compute(), FlatParameter::at(flat.written_at, flat.layout.dtype, entry.offset),
                      entry.parameter->bytes());
    entry.parameter->unbind_gradient();
  }
  if (flat.written_gradient) cast_gradients(flat);
}

void GradReducer::start_reduction(bool last) {
  last_ = last;
  stages_ = last ? group_.plan().reductions.size() : group_.plan().reduced_each;
  const bool holds = !last && stages_ == 0;
  if (holds && state_ != State::writing) return;  // the unit was not used, and no rank waits for its zeros
  prepare_gradients();
  stage_input_.clear();
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    end_writing(flat);
    stage_input_.push_back({0, flat.layout.padded});
  }
  if (holds) {
    accumulated_ = Accumulated::in_full;
    state_ = State::idle;
    return;
  }
  if (accumulated_ == Accumulated::in_full) accumulated_ = Accumulated::none;  // this reduction includes that sum
  state_ = State::reducing;
  stage_ = 0;
  if (stages_ == 0) {
    finish_reduction();
  } else {
    resources_.reduce_stream->wait(resources_.compute().record());
    start_stage();
  }
}

std::vector<FlatTransfer> GradReducer::stage_transfers(const ReduceStage& stage) {
  const Mesh& mesh = resources_.mesh;
  std::vector<FlatTransfer> transfers;
  std::size_t index = 0;
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    ElementRange& range = stage_input_[index++];
    // Full gradients are leased until a stage has written a shard of them to the kept buffer.
    const bool leased = static_cast<bool>(flat.full_gradient);
    void* from = leased ? flat.leased_gradient_at(range.begin) : flat.gradient_at(range.begin);
    const auto count = static_cast<std::size_t>(range.count());
    void* to = from;
    std::size_t out_count = count;
    if (stage.scatter) {
      const std::int64_t part = range.count() / mesh.shape().size_of(stage.axis);
      const std::int64_t begin = range.begin + part * mesh.coordinate(stage.axis);
      range = {begin, begin + part};
      out_count = static_cast<std::size_t>(part);
      const bool in_place = leased && (!stage.to_kept || accumulated_ == Accumulated::in_kept);
      to = in_place ? flat.leased_gradient_at(begin) : flat.gradient_at(begin);
    }
    const DType dtype = flat.precision.reduce;
    transfers.push_back(
        {{from, count, dtype, resources_.device()}, {to, out_count, dtype, resources_.device()}, &flat.layout});
  }
  return transfers;
}

/// A sum that the last stage divides. If gradients are reduced in f16, whose largest number is 65504, every stage
/// divides its summands: then no intermediate sum is larger than the largest gradient.
comm::ReduceOp GradReducer::op_of(const ReduceStage& stage) const {
  const std::vector<FlatParameter>& flats = group_.flats();
  const bool in_f16 = std::any_of(flats.begin(), flats.end(), [](const FlatParameter& flat) {
    return flat.trainable() && flat.precision.reduce == DType::f16;
  });
  return in_f16 ? comm::ReduceOp::premul_sum(1.0 / resources_.mesh.shape().size_of(stage.axis)) : stage.op;
}

void GradReducer::start_stage() {
  const ReduceStage& stage = group_.plan().reductions[stage_];
  Stream& stream = *resources_.reduce_stream;
  const TraceRecorder::Span span =
      resources_.trace.begin(TraceEventKind::reduce_issue, group_.name(), group_.bytes(), stream);
  EngineCollectives& collectives = resources_.collectives;
  CollectivePlugin& plugin = stage.scatter ? collectives.reduce_scatter() : collectives.all_reduce();
  const std::vector<FlatTransfer> transfers = stage_transfers(stage);
  reductions_ = plugin.run({*resources_.mesh.channels(stage.axis).reduce,
                            transfers,
                            op_of(stage),
                            {.after = &stream, .label = group_.name()},
                            resources_.copier});
  resources_.trace.end(span, stream);
}

void GradReducer::advance_reduction() {
  if (!reducing()) return;
  Stream& stream = resources_.compute();
  const TraceRecorder::Span span =
      resources_.trace.begin(TraceEventKind::reduce_wait, group_.name(), group_.bytes(), stream);
  const bool more = reductions_.advance(stream);
  resources_.trace.end(span, stream);
  if (more) return;
  const bool adds = accumulated_ == Accumulated::in_kept;
  if (group_.plan().reductions[stage_].to_kept && !adds)
    for (FlatParameter& flat : group_.flats())
      if (flat.full_gradient) flat.full_gradient.release(stream.record());
  ++stage_;
  if (adds && stage_ == group_.plan().reduced_each) add_earlier_microbatches();
  if (stage_ == stages_) {
    finish_reduction();
  } else {
    resources_.reduce_stream->wait(stream.record());
    start_stage();
  }
}

/// Adds this microbatch's reduced gradients in the lease to the kept ones of earlier microbatches. The sum is in the
/// kept buffer, or in the lease if kept gradients are offloaded.
void GradReducer::add_earlier_microbatches() {
  Stream& stream = resources_.compute();
  std::size_t index = 0;
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const ElementRange range = stage_input_[index++];
    const auto count = static_cast<std::size_t>(range.count());
    void* const kept = flat.gradient_at(range.begin);
    void* const leased = flat.leased_gradient_at(range.begin);
    if (!group_.plan().offloaded.gradients) {
      add_gradients(flat, leased, kept, count);
      flat.full_gradient.release(stream.record());
      continue;
    }
    Stream& up = resources_.offload->up();
    const std::size_t bytes = count * size_of(flat.precision.reduce);
    Lease earlier = resources_.gradients.acquire(bytes, group_.name(), up);
    up.wait(stored_);
    resources_.copier.upload(up, earlier.data(), kept, bytes);
    stream.wait(up.record());
    add_gradients(flat, earlier.data(), leased, count);
    earlier.release(stream.record());
  }
}

void GradReducer::finish_reduction() {
  state_ = State::idle;
  accumulated_ = last_ ? Accumulated::none : Accumulated::in_kept;
  if (last_ && norm_.partials != nullptr) update_norm_partials();
  if (group_.plan().offloaded.gradients) store_gradients();
}

/// Copies this rank's shard from the lease to the host. The previous step no longer uses the host's copy: the compute
/// stream is past that step's updates, and those came after the upload of their gradients.
void GradReducer::store_gradients() {
  Stream& down = resources_.offload->down();
  down.wait(resources_.compute().record());
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const std::int64_t first = flat.optimized.begin;
    resources_.copier.download(down, flat.gradient_at(first), flat.leased_gradient_at(first),
                               static_cast<std::size_t>(flat.optimized.count()) * size_of(flat.precision.reduce));
  }
  stored_ = down.record();
  for (FlatParameter& flat : group_.flats())
    if (flat.full_gradient) flat.full_gradient.release(stored_);
}

void GradReducer::for_each_gradient(const std::function<void(const GradientShard&)>& visitor) {
  for (FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, flat.optimized);
      if (range.count() == 0) continue;
      visitor({.parameter = *entry.parameter,
               .range = range,
               .dtype = flat.precision.reduce,
               .data = flat.gradient_at(entry.offset + range.begin),
               .offloaded = group_.plan().offloaded.gradients});
    }
  }
}

std::size_t GradReducer::norm_slots() const {
  const std::vector<FlatParameter>& flats = group_.flats();
  return static_cast<std::size_t>(
      std::count_if(flats.begin(), flats.end(), [](const auto& f) { return f.trainable(); }) * resources_.mesh.size());
}

void GradReducer::update_norm_partials() {
  const int world = resources_.mesh.size();
  const ElementRange own = narrow({0, world}, norm_.slices);  // of each flat parameter's slices; axes divide the world
  auto first = static_cast<std::size_t>(own.begin);
  for (const FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const std::int64_t length = flat.layout.padded / world;
    resources_.runtime.norm_slices({.norm = norm_.norm,
                                    .dtype = flat.precision.reduce,
                                    .x = flat.reduced_gradient_at(length * own.begin),
                                    .count = static_cast<std::size_t>(length),
                                    .slices = static_cast<std::size_t>(own.count()),
                                    .counters = norm_.counters + first,
                                    .out = norm_.partials + first});
    first += static_cast<std::size_t>(world);
  }
}

void GradReducer::reset() {
  reductions_ = WorkChain();
  state_ = State::idle;
  accumulated_ = Accumulated::none;
  for (FlatParameter& flat : group_.flats()) {
    for (const FlatEntry& entry : flat.layout.entries) entry.parameter->unbind_gradient();
    if (flat.full_gradient) flat.full_gradient.release(Event());
    if (flat.written_gradient) flat.written_gradient.release(Event());
  }
}

}  // namespace tessera::fsdp
