#include "tessera/fsdp/engine/sharded_optimizer.h"

#include <algorithm>

namespace tessera::fsdp {

ShardedOptimizer::ShardedOptimizer(EngineResources& resources, ParamGroup& group, const GradReducer& reducer)
    : resources_(resources), group_(group), reducer_(reducer) {
  lay_out();
}

void ShardedOptimizer::lay_out() {
  ranges_.clear();
  for (std::size_t i = 0; i < group_.flats().size(); ++i)
    if (group_.flats()[i].trainable()) add_ranges(i);
}

/// Padding joins the part before it: it is zero and stays zero. So parts begin at multiples of kFlatAlignment.
void ShardedOptimizer::add_ranges(std::size_t index) {
  const FlatParameter& flat = group_.flats()[index];
  bool joins = false;
  for (const FlatEntry& entry : flat.layout.entries) {
    const std::int64_t begin = std::max(flat.optimized.begin, entry.offset);
    const std::int64_t end = std::min(flat.optimized.end, entry.end());
    if (begin >= end) continue;
    const bool decay = entry.parameter->decays();
    const std::uint64_t since = trained_since(*entry.parameter);
    if (!joins || ranges_.back().since != since) ranges_.push_back({index, {begin, end}, since, {}});
    joins = true;
    UpdateRange& last = ranges_.back();
    last.range.end = end;
    if (!last.parts.empty()) last.parts.back().end = begin;
    if (last.parts.empty() || last.parts.back().decay != decay) last.parts.push_back({end, decay});
    last.parts.back().end = end;
  }
}

/// The parts of a chunk of the range; they end within the chunk.
std::vector<DecayRange> ShardedOptimizer::parts_within(const UpdateRange& all, ElementRange chunk) {
  std::vector<DecayRange> parts;
  for (const DecayRange& part : all.parts) {
    if (part.end <= chunk.begin) continue;
    parts.push_back({std::min(part.end, chunk.end) - chunk.begin, part.decay});
    if (part.end >= chunk.end) break;
  }
  return parts;
}

std::uint64_t ShardedOptimizer::trained_since(const Parameter& parameter) const {
  const auto found = trained_since_.find(&parameter);
  return found == trained_since_.end() ? 0 : found->second;
}

void ShardedOptimizer::set_trained_since(const std::function<std::uint64_t(const Parameter&)>& step) {
  for (const auto& parameter : group_.spec().parameters) trained_since_[parameter.get()] = step(*parameter);
  lay_out();
}

void ShardedOptimizer::begin_training_of_unfrozen(std::uint64_t steps) {
  for (const FlatParameter& flat : group_.flats())
    for (const FlatEntry& entry : flat.layout.entries)
      if (entry.parameter->requires_grad() && !flat.trainable()) trained_since_[entry.parameter.get()] = steps;
}

void ShardedOptimizer::update(const EngineOptions& options, const OptimizerStep& step) {
  Stream& stream = resources_.compute();
  CpuOffload* const offload = resources_.offload.get();
  const TraceRecorder::Span span =
      resources_.trace.begin(TraceEventKind::optimizer_step, group_.name(), group_.bytes(), stream);
  if (offload != nullptr) offload->up().wait(reducer_.stored());
  for (const UpdateRange& all : ranges_) {
    OptimizerStep own = step;
    own.number -= all.since;
    const std::int64_t most = offload == nullptr ? all.range.count() : resources_.offload_chunk_elements;
    for (std::int64_t begin = all.range.begin; begin < all.range.end; begin += most) {
      const ElementRange chunk = {begin, std::min(begin + most, all.range.end)};
      const std::vector<DecayRange> parts = parts_within(all, chunk);
      if (offload != nullptr) offload->begin_chunk();
      OptimizerRange buffers = buffers_of(all.flat, chunk);
      buffers.parts = parts;
      if (offload != nullptr) offload->wait_for_uploads();
      if (options.program_optimizer)
        update_by_program(*options.program_optimizer, own, all.flat, chunk, buffers);
      else
        resources_.runtime.update(options.optimizer, own, buffers);
      if (offload != nullptr) offload->start_downloads();
    }
  }
  if (offload != nullptr) group_.set_stored(offload->down().record());
  resources_.trace.end(span, stream);
}

/// `buffers`: of `chunk`. Padding stays as it is.
void ShardedOptimizer::update_by_program(const ProgramOptimizer& program, const OptimizerStep& step, std::size_t flat,
                                         ElementRange chunk, const OptimizerRange& buffers) {
  const bool is_half = buffers.gradients == nullptr;
  const DType gradient_dtype = is_half ? buffers.half.dtype : DType::f32;
  const auto* const gradients = static_cast<const std::byte*>(is_half ? buffers.half.gradient : buffers.gradients);
  for (const FlatEntry& entry : group_.flats()[flat].layout.entries) {
    const ElementRange range = within(entry, chunk);
    if (range.count() == 0) continue;
    const std::int64_t first = entry.offset + range.begin - chunk.begin;
    OptimizerShard shard{.parameter = *entry.parameter,
                         .range = range,
                         .values = buffers.values + first,
                         .gradients = gradients + first * static_cast<std::int64_t>(size_of(gradient_dtype)),
                         .gradient_dtype = gradient_dtype};
    for (int i = 0; i < program.slots; ++i)
      shard.state[static_cast<std::size_t>(i)] = buffers.state[static_cast<std::size_t>(i)] + first;
    program.update(shard, step);
  }
  if (buffers.half.copy != nullptr)
    resources_.runtime.convert(resources_.compute(), buffers.values, DType::f32, buffers.half.copy, buffers.half.dtype,
                               static_cast<std::size_t>(chunk.count()));
}

/// The buffers that an update of a range reads and writes: at rest, or in a chunk on the device.
OptimizerRange ShardedOptimizer::buffers_of(std::size_t index, ElementRange chunk) {
  const ShardingPlan::OffloadedState& offloaded = group_.plan().offloaded;
  const FlatParameter& flat = group_.flats()[index];
  const std::int64_t first = chunk.begin;
  const auto count = static_cast<std::size_t>(chunk.count());
  const auto updated = [&](void* at, bool on_host) {
    return static_cast<float*>(on_host ? resources_.offload->exchange(at, count * sizeof(float)) : at);
  };
  OptimizerRange range{.count = chunk.count()};
  if (flat.precision.has_master_weights()) {
    void* values = flat.value_at(first);
    range.values = updated(flat.master_at(first), offloaded.optimizer);
    if (offloaded.parameters) values = resources_.offload->reserve_download(values, count * size_of(flat.layout.dtype));
    range.half = {flat.layout.dtype, nullptr, values};
  } else {
    range.values = updated(flat.value_at(first), offloaded.parameters);
  }
  const void* gradient = flat.gradient_at(first);
  if (offloaded.gradients) gradient = resources_.offload->upload(gradient, count * size_of(flat.precision.reduce));
  if (flat.precision.reduce == DType::f32) {
    range.gradients = static_cast<const float*>(gradient);
  } else {
    range.half.gradient = gradient;
  }
  for (std::size_t i = 0; i < flat.state.size(); ++i)
    range.state[i] = updated(flat.state_at(i, first), offloaded.optimizer);
  return range;
}

std::size_t ShardedOptimizer::chunk_bytes() const {
  std::size_t most = 0;
  for (const FlatParameter& flat : group_.flats()) {
    if (!flat.trainable()) continue;
    const auto count = static_cast<std::size_t>(std::min(flat.optimized.count(), resources_.offload_chunk_elements));
    const std::size_t f32 = CpuOffload::aligned(count * sizeof(float));  // of values, gradients and each state
    const std::size_t half =
        flat.precision.has_master_weights() ? CpuOffload::aligned(count * size_of(flat.layout.dtype)) : 0;
    most = std::max(most, (2 + flat.state.size()) * f32 + half);
  }
  return most;
}

void ShardedOptimizer::clear() {
  for (FlatParameter& flat : group_.flats())
    for (Buffer& state : flat.state) {
      if (group_.plan().offloaded.optimizer) {
        resources_.offload->clear(state);
      } else {
        resources_.zero(resources_.compute(), state.data(), state.bytes());
      }
    }
}

}  // namespace tessera::fsdp
