#include "tessera/fsdp/engine/group_state.h"

#include <algorithm>

namespace tessera::fsdp {
namespace {

std::size_t length(ElementRange range) { return static_cast<std::size_t>(range.count()); }

ElementRange common(ElementRange a, ElementRange b) {
  const ElementRange both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.count() > 0 ? both : ElementRange{0, 0};
}

}  // namespace

/// Writes to `at` what `produce` writes to device memory on the compute stream.
void GroupState::write(bool offloaded, void* at, std::size_t bytes, const std::function<void(void* device)>& produce) {
  if (!offloaded) return produce(at);
  Buffer scratch = resources_.runtime.memory().allocate(bytes, MemoryCategory::other);
  produce(scratch.data());
  resources_.copier.download(resources_.compute(), at, scratch.data(), bytes);
  resources_.compute().hold(std::make_shared<Buffer>(std::move(scratch)));
}

void GroupState::initialize(std::uint64_t seed) {
  const ShardingPlan::OffloadedState& offloaded = group_.plan().offloaded;
  for (FlatParameter& flat : group_.flats()) {
    for (const FlatEntry& entry : flat.layout.entries) {
      const auto draw = [&](bool on_host, ElementRange range, DType dtype, void* at) {
        if (range.count() == 0) return;
        write(on_host, at, length(range) * size_of(dtype),
              [&](void* out) { entry.parameter->fill_initial(seed, range, dtype, out); });
      };
      const ElementRange range = within(entry, flat.rest);
      draw(offloaded.parameters, range, flat.layout.dtype, flat.value_at(entry.offset + range.begin));
      if (!flat.master_weights) continue;
      const ElementRange own = within(entry, flat.optimized);
      draw(offloaded.optimizer, own, DType::f32, flat.master_at(entry.offset + own.begin));
    }
  }
}

void GroupState::load(const ShardedState::ParameterLoader& fill, const ShardedState::ParameterFilter& wanted) {
  resources_.compute().synchronize();  // the host may write over what the stream's work reads
  for (FlatParameter& flat : group_.flats())
    for (const FlatEntry& entry : flat.layout.entries)
      if (within(entry, flat.rest).count() > 0 && (!wanted || wanted(*entry.parameter))) load_values(flat, entry, fill);
}

void GroupState::load_values(FlatParameter& flat, const FlatEntry& entry, const ShardedState::ParameterLoader& fill) {
  const ElementRange range = within(entry, flat.rest);
  void* const at = flat.value_at(entry.offset + range.begin);
  const auto write_to = [&](void* out) { fill(*entry.parameter, range, static_cast<float*>(out)); };
  if (flat.quantized()) {
    load_bytes(*entry.parameter, range, fill, at);
  } else if (flat.layout.dtype != DType::f32) {
    load_half(flat, entry, fill);
  } else if (group_.plan().offloaded.parameters) {
    write_to(at);
  } else {
    resources_.runtime.upload(at, length(range) * sizeof(float), write_to);
  }
}

/// An encoding's bytes are passed as numbers, as all values are.
void GroupState::load_bytes(const Parameter& parameter, ElementRange range, const ShardedState::ParameterLoader& fill,
                            void* at) {
  std::vector<float> numbers(length(range));
  fill(parameter, range, numbers.data());
  const auto write_to = [&](void* out) {
    std::transform(numbers.begin(), numbers.end(), static_cast<std::uint8_t*>(out),
                   [](float number) { return static_cast<std::uint8_t>(number); });
  };
  if (group_.plan().offloaded.parameters) return write_to(at);
  resources_.runtime.upload(at, length(range), write_to);
}

/// Sets half-precision values and their master weights from f32 values.
void GroupState::load_half(FlatParameter& flat, const FlatEntry& entry, const ShardedState::ParameterLoader& fill) {
  Runtime& runtime = resources_.runtime;
  Stream& stream = resources_.compute();
  const ShardingPlan::OffloadedState& offloaded = group_.plan().offloaded;
  const ElementRange range = within(entry, flat.rest);
  const std::int64_t first = entry.offset + range.begin;
  Buffer values = runtime.memory().allocate(length(range) * sizeof(float), MemoryCategory::other);
  runtime.upload(values.data(), values.bytes(),
                 [&](void* out) { fill(*entry.parameter, range, static_cast<float*>(out)); });
  write(offloaded.parameters, flat.value_at(first), length(range) * size_of(flat.layout.dtype),
        [&](void* out) { runtime.convert(stream, values.data(), DType::f32, out, flat.layout.dtype, length(range)); });
  const ElementRange own = common({first, first + range.count()}, flat.optimized);
  if (flat.master_weights && own.count() > 0)
    write(offloaded.optimizer, flat.master_at(own.begin), length(own) * sizeof(float), [&](void* out) {
      runtime.assign(stream, DType::f32, FlatParameter::f32_at(values, own.begin - first), out, length(own), false);
    });
  stream.hold(std::make_shared<Buffer>(std::move(values)));
}

void GroupState::load_optimizer_state(const ShardedState::OptimizerLoader& fill,
                                      const ShardedState::ParameterFilter& wanted) {
  resources_.compute().synchronize();  // the host may write over what the stream's work reads
  for (FlatParameter& flat : group_.flats())
    for (const FlatEntry& entry : flat.layout.entries)
      for (std::size_t i = 0; i < flat.state.size(); ++i) {
        const ElementRange range = within(entry, flat.optimized);
        if (range.count() == 0 || (wanted && !wanted(*entry.parameter))) continue;
        float* const to = flat.state_at(i, entry.offset + range.begin);
        const auto write_to = [&](void* out) {
          fill(*entry.parameter, static_cast<int>(i), range, static_cast<float*>(out));
        };
        if (group_.plan().offloaded.optimizer) {
          write_to(to);
        } else {
          resources_.runtime.upload(to, length(range) * sizeof(float), write_to);
        }
      }
}

void GroupState::for_each_shard(const std::function<void(const ShardRange&)>& visitor) const {
  const ShardingPlan& plan = group_.plan();
  for (const FlatParameter& flat : group_.flats()) {
    const std::int64_t padded = flat.layout.padded;
    const ElementRange own = flat.trainable() ? plan.own(padded) : plan.own_frozen(padded);
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, own);
      if (range.count() == 0) continue;
      const std::int64_t first = entry.offset + range.begin;
      const auto visit = [&](int state, DType dtype, const void* data, bool on_host) {
        visitor({.parameter = *entry.parameter,
                 .state = state,
                 .range = range,
                 .dtype = dtype,
                 .data = data,
                 .offloaded = on_host});
      };
      if (flat.anchor) {  // the same on all replicas; what each replica alone holds is plug-in state
        visit(-1, DType::f32, FlatParameter::f32_at(flat.anchor, first - flat.optimized.begin), false);
      } else if (flat.master_weights) {
        visit(-1, DType::f32, flat.master_at(first), plan.offloaded.optimizer);
      } else {
        visit(-1, flat.layout.dtype, flat.value_at(first), plan.offloaded.parameters);
      }
      for (std::size_t i = 0; i < flat.state.size(); ++i)
        visit(static_cast<int>(i), DType::f32, flat.state_at(i, first), plan.offloaded.optimizer);
    }
  }
}

/// Gathers the optimizer's shards into `full_values`, over the control communicators, because a collective plug-in may
/// round.
void GroupState::gather_optimized(FlatParameter& flat, const float* shard) {
  Stream& stream = resources_.compute();
  const ShardingPlan& plan = group_.plan();
  const std::int64_t padded = flat.layout.padded;
  const auto view = [&](ElementRange range) {
    return comm::View{FlatParameter::f32_at(flat.full_values, range.begin), length(range), DType::f32,
                      resources_.device()};
  };
  float* const own = FlatParameter::f32_at(flat.full_values, flat.optimized.begin);
  if (plan.offloaded.optimizer) {
    resources_.copier.upload(stream, own, shard, length(flat.optimized) * sizeof(float));
  } else {
    resources_.runtime.assign(stream, DType::f32, shard, own, length(flat.optimized), false);
  }
  for (std::size_t i = 0; i < plan.optimizer_slices.size(); ++i) {  // innermost first
    const ShardingPlan::AxisSlice& slice = plan.optimizer_slices[plan.optimizer_slices.size() - 1 - i];
    resources_.mesh.channels(slice.axis)
        .control
        ->all_gather(view(plan.after_gathers(padded, i)), view(plan.after_gathers(padded, i + 1)),
                     {.after = &stream, .label = group_.name()})
        .wait_on(stream);
  }
}

/// As gather_optimized(), for parameters at rest.
void GroupState::gather_exactly(FlatParameter& flat) {
  Stream& stream = resources_.compute();
  const ShardingPlan& plan = group_.plan();
  const DType dtype = flat.layout.dtype;
  Buffer whole = resources_.allocate(flat.layout.bytes(), MemoryCategory::other);
  const void* part = flat.values.data();
  if (plan.offloaded.parameters) {
    void* const place = FlatParameter::at(whole.data(), dtype, flat.rest.begin);
    resources_.copier.upload(stream, place, part, flat.values.bytes());
    part = place;
  }
  for (std::size_t i = 0; i < plan.gather_axes.size(); ++i) {
    const ElementRange from = plan.unsharded(flat.layout.padded, i), to = plan.unsharded(flat.layout.padded, i + 1);
    if (i > 0) part = FlatParameter::at(whole.data(), dtype, from.begin);
    resources_.mesh.channels(plan.gather_axes[i])
        .control
        ->all_gather({part, length(from), dtype, resources_.device()},
                     {FlatParameter::at(whole.data(), dtype, to.begin), length(to), dtype, resources_.device()},
                     {.after = &stream, .label = group_.name()})
        .wait_on(stream);
  }
  if (dtype == DType::f32 || flat.quantized()) {
    flat.full_values = std::move(whole);
    return;
  }
  const std::size_t count = length({0, flat.layout.padded});
  flat.full_values = resources_.allocate(count * sizeof(float), MemoryCategory::other);
  resources_.runtime.convert(stream, whole.data(), dtype, flat.full_values.data(), DType::f32, count);
  stream.hold(std::make_shared<Buffer>(std::move(whole)));
}

void GroupState::gather_full() {
  const bool exact = resources_.collectives.exact_gathers() || group_.plan().gather_axes.empty();
  std::vector<FlatParameter>& flats = group_.flats();
  if (exact && std::any_of(flats.begin(), flats.end(), [](const FlatParameter& flat) { return !flat.master_weights; }))
    group_.wait_for_unshard();
  for (FlatParameter& flat : flats) {
    if (!exact && !flat.master_weights) gather_exactly(flat);
    if (flat.layout.dtype == DType::f32 || flat.quantized() || flat.full_values) continue;
    const std::size_t count = length({0, flat.layout.padded});
    flat.full_values = resources_.allocate(count * sizeof(float), MemoryCategory::other);
    if (flat.master_weights) {
      gather_optimized(flat, flat.master_at(flat.optimized.begin));
    } else {
      const void* from = group_.plan().unshards_to_lease ? flat.unsharded.data() : flat.values.data();
      resources_.runtime.convert(resources_.compute(), from, flat.layout.dtype, flat.full_values.data(), DType::f32,
                                 count);
    }
  }
}

void GroupState::download(const Parameter& parameter, const std::function<void(std::span<const float>)>& visitor) {
  const auto count = static_cast<std::size_t>(parameter.count());
  const void* values = nullptr;
  bool quantized = false;
  for (const FlatParameter& flat : group_.flats())
    for (const FlatEntry& entry : flat.layout.entries) {
      if (entry.parameter.get() != &parameter) continue;
      quantized = flat.quantized();
      const DType dtype = quantized ? flat.layout.dtype : DType::f32;
      values = flat.full_values ? FlatParameter::at(flat.full_values.data(), dtype, entry.offset) : parameter.data();
    }
  resources_.runtime.download(values, count * (quantized ? 1 : sizeof(float)), [&](const void* from) {
    if (!quantized) return visitor({static_cast<const float*>(from), count});
    const auto* const bytes = static_cast<const std::uint8_t*>(from);
    visitor(std::vector<float>(bytes, bytes + count));
  });
}

void GroupState::release_full() {
  resources_.compute().synchronize();  // nothing uses what is released
  for (FlatParameter& flat : group_.flats()) flat.full_values = Buffer();
  group_.reshard();
}

GroupState::FullState GroupState::download_all() {
  FullState full;
  gather_full();
  for (const auto& parameter : group_.spec().parameters)
    download(*parameter,
             [&](std::span<const float> values) { full[parameter.get()].emplace_back(values.begin(), values.end()); });
  release_full();
  for (FlatParameter& flat : group_.flats()) {
    if (flat.state.empty()) continue;
    flat.full_values = resources_.allocate(length({0, flat.layout.padded}) * sizeof(float), MemoryCategory::other);
    for (const Buffer& state : flat.state) {
      gather_optimized(flat, FlatParameter::f32_at(state, 0));
      for (const FlatEntry& entry : flat.layout.entries)
        download(*entry.parameter, [&](std::span<const float> values) {
          full[entry.parameter.get()].emplace_back(values.begin(), values.end());
        });
    }
    flat.full_values = Buffer();
  }
  return full;
}

void GroupState::load_all(const FullState& full) {
  const auto copy = [&](const Parameter& parameter, std::size_t which, ElementRange range, float* out) {
    std::copy_n(full.at(&parameter)[which].data() + range.begin, range.count(), out);
  };
  load([&](const Parameter& parameter, ElementRange range, float* out) { copy(parameter, 0, range, out); }, {});
  load_optimizer_state([&](const Parameter& parameter, int state, ElementRange range,
                           float* out) { copy(parameter, static_cast<std::size_t>(state) + 1, range, out); },
                       [&](const Parameter& parameter) { return full.at(&parameter).size() > 1; });
}

}  // namespace tessera::fsdp
