// Setting and reading the values of a unit. The f32 master weights of half-precision parameters are authoritative: they
// are written first, and are what is read.
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {
namespace {

std::size_t length(ElementRange range) { return static_cast<std::size_t>(range.count()); }

ElementRange common(ElementRange a, ElementRange b) {
  const ElementRange both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
  return both.count() > 0 ? both : ElementRange{0, 0};
}

}  // namespace

/// Writes to `at` what `produce` writes to device memory on the compute stream.
void ParamGroup::write(bool offloaded, void* at, std::size_t bytes, const Produce& produce) {
  if (!offloaded) return produce(at);
  Buffer scratch = fabric_.context.memory().allocate(bytes, MemoryCategory::other);
  produce(scratch.data());
  fabric_.copier.download(fabric_.compute(), at, scratch.data(), bytes);
  fabric_.compute().hold(std::make_shared<Buffer>(std::move(scratch)));
}

void ParamGroup::initialize(std::uint64_t seed) {
  const ShardingPlan::OffloadedState& offloaded = plan_.offloaded;
  for (FlatParameter& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) {
      const auto draw = [&](bool with_host, ElementRange range, DType dtype, void* at) {
        if (range.count() == 0) return;
        write(with_host, at, length(range) * size_of(dtype), [&](void* out) {
          nn::fill_initial(fabric_.context, {entry.parameter->init(), entry.parameter->name(), seed, range}, dtype,
                           out);
        });
      };
      const ElementRange range = within(entry, flat.rest);
      draw(offloaded.parameters, range, flat.layout.dtype, flat.value_of(entry.offset + range.begin));
      if (!flat.masters) continue;
      const ElementRange own = within(entry, flat.optimized);
      draw(offloaded.optimizer, own, DType::f32, flat.master_of(entry.offset + own.begin));
    }
  }
}

/// An encoding's bytes are passed as numbers, as all values are.
void ParamGroup::fill_bytes(const nn::Parameter& parameter, ElementRange range, const ParameterLoader& fill, void* at) {
  std::vector<float> numbers(length(range));
  fill(parameter, range, numbers.data());
  const auto narrow = [&](void* out) {
    std::transform(numbers.begin(), numbers.end(), static_cast<std::uint8_t*>(out),
                   [](float number) { return static_cast<std::uint8_t>(number); });
  };
  if (plan_.offloaded.parameters) return narrow(at);
  nn::upload(fabric_.context, at, length(range), narrow);
}

void ParamGroup::load(const ParameterLoader& fill, const Engine::ParameterFilter& wanted) {
  nn::Context& context = fabric_.context;
  Stream& stream = fabric_.compute();
  const ShardingPlan::OffloadedState& offloaded = plan_.offloaded;
  stream.synchronize();  // the host may write over what the stream's work reads
  for (FlatParameter& flat : flats_) {
    const bool narrow = flat.layout.dtype != DType::f32;
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, flat.rest);
      if (range.count() == 0 || (wanted && !wanted(*entry.parameter))) continue;
      const std::int64_t first = entry.offset + range.begin;
      if (flat.encoded()) {
        fill_bytes(*entry.parameter, range, fill, flat.value_of(first));
        continue;
      }
      if (offloaded.parameters && !narrow) {
        fill(*entry.parameter, range, static_cast<float*>(flat.value_of(first)));
        continue;
      }
      Buffer wide;
      if (narrow) wide = context.memory().allocate(length(range) * sizeof(float), MemoryCategory::other);
      void* to = narrow ? wide.data() : flat.value_of(first);
      nn::upload(context, to, length(range) * sizeof(float),
                 [&](void* out) { fill(*entry.parameter, range, static_cast<float*>(out)); });
      if (!narrow) continue;
      write(offloaded.parameters, flat.value_of(first), length(range) * size_of(flat.layout.dtype), [&](void* out) {
        context.device_kernels().convert(stream, {to, DType::f32, out, flat.layout.dtype, length(range)});
      });
      const ElementRange own = common({first, first + range.count()}, flat.optimized);
      if (flat.masters && own.count() > 0)
        write(offloaded.optimizer, flat.master_of(own.begin), length(own) * sizeof(float), [&](void* out) {
          context.kernels<float>("fill").assign(
              stream, {FlatParameter::f32_of(wide, own.begin - first), static_cast<float*>(out), length(own), false});
        });
      stream.hold(std::make_shared<Buffer>(std::move(wide)));
    }
  }
}

void ParamGroup::for_each_shard(const std::function<void(const ShardRange&)>& visit) const {
  const ShardingPlan::OffloadedState& offloaded = plan_.offloaded;
  for (const FlatParameter& flat : flats_) {
    const std::int64_t padded = flat.layout.padded;
    const ElementRange own = flat.layout.trainable ? plan_.own(padded) : plan_.own_frozen(padded);
    for (const FlatEntry& entry : flat.layout.entries) {
      const ElementRange range = within(entry, own);
      if (range.count() == 0) continue;
      const std::int64_t first = entry.offset + range.begin;
      const auto show = [&](int state, DType dtype, const void* data, bool with_host) {
        visit({.parameter = *entry.parameter,
               .state = state,
               .range = range,
               .dtype = dtype,
               .data = data,
               .offloaded = with_host});
      };
      if (flat.anchor) {  // the same on all replicas; what each replica alone holds is plug-in state
        show(-1, DType::f32, FlatParameter::f32_of(flat.anchor, first - flat.optimized.begin), false);
      } else if (flat.masters) {
        show(-1, DType::f32, flat.master_of(first), offloaded.optimizer);
      } else {
        show(-1, flat.layout.dtype, flat.value_of(first), offloaded.parameters);
      }
      for (std::size_t i = 0; i < flat.state.size(); ++i)
        show(static_cast<int>(i), DType::f32, FlatParameter::f32_of(flat.state[i], first - flat.optimized.begin),
             offloaded.optimizer);
    }
  }
}

void ParamGroup::load_optimizer_state(const std::function<void(const nn::Parameter&, int, ElementRange, float*)>& fill,
                                      const Engine::ParameterFilter& wanted) {
  fabric_.compute().synchronize();  // the host may write over what the stream's work reads
  for (FlatParameter& flat : flats_)
    for (const FlatEntry& entry : flat.layout.entries)
      for (std::size_t i = 0; i < flat.state.size(); ++i) {
        const ElementRange range = within(entry, flat.optimized);
        if (range.count() == 0 || (wanted && !wanted(*entry.parameter))) continue;
        float* to = FlatParameter::f32_of(flat.state[i], entry.offset + range.begin - flat.optimized.begin);
        const auto write = [&](void* out) {
          fill(*entry.parameter, static_cast<int>(i), range, static_cast<float*>(out));
        };
        if (plan_.offloaded.optimizer) {
          write(to);
        } else {
          nn::upload(fabric_.context, to, length(range) * sizeof(float), write);
        }
      }
}

/// Gathers the optimizer's shards into `shown`, over the control communicators, because a collective plug-in may round.
void ParamGroup::gather_part(FlatParameter& flat, const float* part) {
  Stream& stream = fabric_.compute();
  const std::int64_t padded = flat.layout.padded;
  const auto view = [&](ElementRange range) {
    return comm::View{FlatParameter::f32_of(flat.shown, range.begin), length(range), DType::f32, fabric_.device()};
  };
  float* const own = FlatParameter::f32_of(flat.shown, flat.optimized.begin);
  if (plan_.offloaded.optimizer) {
    fabric_.copier.upload(stream, own, part, length(flat.optimized) * sizeof(float));
  } else {
    fabric_.context.kernels<float>("values").assign(stream, {part, own, length(flat.optimized), false});
  }
  for (std::size_t i = 0; i < plan_.optimizer_cuts.size(); ++i) {  // innermost first
    const ShardingPlan::AxisSlice& cut = plan_.optimizer_cuts[plan_.optimizer_cuts.size() - 1 - i];
    fabric_.mesh.channels(cut.axis)
        .control
        ->all_gather(view(plan_.after_gathers(padded, i)), view(plan_.after_gathers(padded, i + 1)),
                     {.after = &stream, .label = name()})
        .wait_on(stream);
  }
}

void ParamGroup::widen_parameters(FlatParameter& flat) {
  const void* from = plan_.unshards_to_lease ? flat.unsharded.data() : flat.values.data();
  fabric_.context.device_kernels().convert(
      fabric_.compute(), {from, flat.layout.dtype, flat.shown.data(), DType::f32, length({0, flat.layout.padded})});
}

/// As gather_part(), for parameters at rest.
void ParamGroup::gather_exactly(FlatParameter& flat) {
  Stream& stream = fabric_.compute();
  const DType dtype = flat.layout.dtype;
  Buffer whole = fabric_.allocate(flat.layout.bytes(), MemoryCategory::other);
  const void* part = flat.values.data();
  if (plan_.offloaded.parameters) {
    void* const place = FlatParameter::at(whole.data(), dtype, flat.rest.begin);
    fabric_.copier.upload(stream, place, part, flat.values.bytes());
    part = place;
  }
  for (std::size_t i = 0; i < plan_.gather_axes.size(); ++i) {
    const ElementRange from = plan_.unsharded(flat.layout.padded, i), to = plan_.unsharded(flat.layout.padded, i + 1);
    if (i > 0) part = FlatParameter::at(whole.data(), dtype, from.begin);
    fabric_.mesh.channels(plan_.gather_axes[i])
        .control
        ->all_gather({part, length(from), dtype, fabric_.device()},
                     {FlatParameter::at(whole.data(), dtype, to.begin), length(to), dtype, fabric_.device()},
                     {.after = &stream, .label = name()})
        .wait_on(stream);
  }
  if (dtype == DType::f32 || flat.encoded()) {
    flat.shown = std::move(whole);
    return;
  }
  flat.shown = fabric_.allocate(length({0, flat.layout.padded}) * sizeof(float), MemoryCategory::other);
  fabric_.context.device_kernels().convert(
      stream, {whole.data(), dtype, flat.shown.data(), DType::f32, length({0, flat.layout.padded})});
  stream.hold(std::make_shared<Buffer>(std::move(whole)));
}

void ParamGroup::gather_full() {
  const bool exact = fabric_.exact_gathers || plan_.gather_axes.empty();
  bool gathers = false;
  for (const FlatParameter& flat : flats_) gathers = gathers || (exact && !flat.masters);
  if (gathers) wait_for_unshard();
  for (FlatParameter& flat : flats_) {
    if (!exact && !flat.masters) gather_exactly(flat);
    if (flat.layout.dtype == DType::f32 || flat.encoded() || flat.shown) continue;
    flat.shown = fabric_.allocate(length({0, flat.layout.padded}) * sizeof(float), MemoryCategory::other);
    if (flat.masters) {
      gather_part(flat, flat.master_of(flat.optimized.begin));
    } else {
      widen_parameters(flat);
    }
  }
}

void ParamGroup::download_values(const nn::Parameter& parameter, const Values& show) {
  const auto count = static_cast<std::size_t>(parameter.count());
  const void* values = nullptr;
  bool encoded = false;
  for (const FlatParameter& flat : flats_)
    for (const FlatEntry& entry : flat.layout.entries) {
      if (entry.parameter.get() != &parameter) continue;
      encoded = flat.encoded();
      const DType dtype = encoded ? flat.layout.dtype : DType::f32;
      values = flat.shown ? FlatParameter::at(flat.shown.data(), dtype, entry.offset) : parameter.tensor().raw();
    }
  nn::download(fabric_.context, values, count * (encoded ? 1 : sizeof(float)), [&](const void* from) {
    if (!encoded) return show({static_cast<const float*>(from), count});
    const auto* const bytes = static_cast<const std::uint8_t*>(from);
    show(std::vector<float>(bytes, bytes + count));
  });
}

void ParamGroup::close_values() {
  fabric_.compute().synchronize();  // nothing uses what is released
  for (FlatParameter& flat : flats_) flat.shown = Buffer();
  reshard();
}

}  // namespace tessera::fsdp
