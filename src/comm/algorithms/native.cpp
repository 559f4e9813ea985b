// A collective of the library below the transport, with the steps it lacks: factors before it, avg's division after it.
#include "tessera/comm/native_collectives.h"

#include <array>

#include "tessera/comm/algorithms/schedule_builder.h"

namespace tessera::comm {
namespace {

constexpr std::array kKinds = {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter,
                               OpKind::broadcast,  OpKind::reduce,     OpKind::gather,
                               OpKind::scatter,    OpKind::all_to_all, OpKind::barrier};

void divide(ScheduleBuilder& builder, Slice what, StepId sum) {
  if (builder.spec().reduce != ReduceOp::Kind::avg) return;
  const Segments segments(what, segment_elements(builder.spec(), 1));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion region = builder.out(segments[s]);
    builder.reduce(ReducePhase::last, {&region, 1}, region, {sum});
  }
}

void write_reduction(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice all = everything(spec);
  const bool scatters = spec.kind == OpKind::reduce_scatter;
  const bool has_out = spec.kind != OpKind::reduce || spec.rank == spec.root;
  const Operand own(builder, has_out && !scatters ? Operand::Target::out : Operand::Target::scratch);
  const Slice result = scatters ? Slice{0, part_of(spec, {}, spec.rank).count} : all;
  const BufferRegion out = has_out ? builder.out(result) : BufferRegion{};
  // The library would write memory that it still reads.
  const bool between = scatters && spec.in_place && spec.reduce != ReduceOp::Kind::premul_sum;
  const BufferRegion to = between ? builder.scratch(out.bytes) : out;
  const StepId sum = builder.native(own.at(all), to, {own.progress().last()});
  const StepId there = between ? builder.copy(to, out, {sum}) : sum;
  if (has_out) divide(builder, result, there);
}

}  // namespace

NativeCommunicator::~NativeCommunicator() = default;

std::span<const OpKind> native_kinds() noexcept { return kKinds; }

Schedule build_native_schedule(const CollectiveSpec& spec) {
  ScheduleBuilder builder(spec, kNativeAlgorithm);
  const Slice all = everything(spec);
  const Slice part = part_of(spec, {}, spec.rank);
  const bool root = spec.rank == spec.root;
  const auto in = [&](Slice slice) { return builder.in({0, slice.count}); };
  const auto out = [&](Slice slice) { return builder.out({0, slice.count}); };
  if (spec.count != 0 || spec.kind == OpKind::barrier) switch (spec.kind) {
      case OpKind::all_reduce:
      case OpKind::reduce_scatter:
      case OpKind::reduce:
        write_reduction(builder);
        break;
      case OpKind::broadcast:
        builder.native(root ? in(all) : BufferRegion{}, out(all));
        if (root) builder.copy(in(all), out(all), {}, spec.in_place);
        break;
      case OpKind::all_gather:
        builder.native(in(part), out(all));
        break;
      case OpKind::gather:
        builder.native(in(part), root ? out(all) : BufferRegion{});
        break;
      case OpKind::scatter:
        builder.native(root ? in(all) : BufferRegion{}, out(part));
        break;
      case OpKind::all_to_all:
        builder.native(in(all), out(all));
        break;
      default:
        builder.native({}, {});
    }
  return std::move(builder).finish();
}

}  // namespace tessera::comm
