#include "tessera/comm/algorithms/operand.h"

#include <algorithm>

namespace tessera::comm {

StepId FilledPrefix::ready(Slice slice) const {
  const std::size_t end = slice.offset + slice.count;
  const auto found = std::ranges::lower_bound(ends_, end, {}, [](const auto& entry) { return entry.first; });
  return found == ends_.end() ? last() : found->second;
}

Operand::Operand(ScheduleBuilder& builder, Target target) : builder_(builder), in_out_(false) {
  const CollectiveSpec& spec = builder.spec();
  in_out_ = target == Target::out && spec.in_place;
  if (spec.reduce != ReduceOp::Kind::premul_sum) return;
  in_out_ = target == Target::out;
  const Slice all = everything(spec);
  product_ = in_out_ ? builder.out(all) : builder.scratch(builder.in(all).bytes);
  StepId factor_ready = kNoStep;
  const BufferRegion factor = builder.own_factor(factor_ready);
  const Segments segments(all, segment_elements(spec, 1));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion from = builder.in(segments[s]);
    const BufferRegion to = sub_region(product_, from.offset, from.bytes);
    const StepId earlier = scaled_.last() == kNoStep ? factor_ready : scaled_.last();
    const Slice segment = segments[s];
    scaled_.add(segment.offset + segment.count, builder.reduce(ReducePhase::whole, {&from, 1}, to, {earlier}, factor));
  }
}

BufferRegion Operand::at(Slice slice) const {
  const BufferRegion region = builder_.in(slice);
  return product_.bytes == 0 ? region : sub_region(product_, region.offset, region.bytes);
}

}  // namespace tessera::comm
