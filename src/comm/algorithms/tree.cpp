// Algorithms along the tree of slices.h (schedule_builder.h): n - 1 edges, with a depth of about log2(n). Partial sums
// are those of the tree, so their order is kept; large data moves in segments, pipelined up and down.
#include <algorithm>
#include <bit>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {
namespace {

/// For each segment: two for every child, and two for the parent; and again on the way down.
std::size_t steps(const ScheduleBuilder& builder) {
  return 3 * static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(builder.ranks()))) + 2;
}

/// Adds the children's sums to this rank's own part, segment by segment.
class SumUp {
 public:
  SumUp(ScheduleBuilder& builder, const TreePosition& place, Operand::Target target)
      : builder_(builder),
        place_(place),
        own_(builder, target),
        children_(builder, kWindow * place.children.size(), SIZE_MAX, bytes(builder)) {}

  static std::size_t bytes(const ScheduleBuilder& builder) {
    const CollectiveSpec& spec = builder.spec();
    return std::min(segment_elements(spec, steps(builder)), spec.count) * builder.element_size();
  }

  struct Sum {
    BufferRegion region;
    StepId ready;
  };
  /// The sum of this rank and all below it. With children it is in `to`, whose old content is no longer read after step
  /// `free`; otherwise it is this rank's own part in its place.
  Sum add(Slice segment, BufferRegion to, StepId free) {
    Sum sum{own_.at(segment), own_.ready(segment)};
    // The smallest subtree finishes first and is the nearest in the tree.
    for (auto child = place_.children.rbegin(); child != place_.children.rend(); ++child) {
      const ScratchRing::Buffer buffer = children_.acquire(to.bytes);
      const StepId received = builder_.receive(child->rank, buffer.region, {buffer.free});
      const bool complete = place_.parent < 0 && child + 1 == place_.children.rend();
      const OrderedPair sources(sum.region, buffer.region, child->above);
      sum.ready = builder_.reduce(complete ? ReducePhase::last : ReducePhase::partial, sources, to,
                                  {received, sum.ready, free});
      sum.region = to;
      children_.release(sum.ready);
    }
    return sum;
  }

 private:
  ScheduleBuilder& builder_;
  const TreePosition& place_;
  Operand own_;
  ScratchRing children_;
};

}  // namespace

void tree_all_reduce(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const TreePosition place = place_in_tree(builder.ranks(), builder.rank(), 0);
  SumUp up(builder, place, Operand::Target::out);
  const Segments segments(everything(spec), segment_elements(spec, steps(builder)));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion out = builder.out(segments[s]);
    SumUp::Sum sum = up.add(segments[s], out, kNoStep);
    if (place.parent >= 0) {
      builder.send(place.parent, sum.region, {sum.ready});
      // By causality this can't overlap the send: the result includes the parent's sum, and thereby this rank's.
      sum.ready = builder.receive(place.parent, out);
    }
    for (const TreeChild& child : place.children) builder.send(child.rank, out, {sum.ready});
  }
}

void binomial_reduce(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const TreePosition place = place_in_tree(builder.ranks(), builder.rank(), spec.root);
  const bool root = place.parent < 0;
  SumUp up(builder, place, root ? Operand::Target::out : Operand::Target::scratch);
  // Only the root has an `out`.
  const bool inner = !root && !place.children.empty();
  ScratchRing sums(builder, inner ? kWindow : 0, kWindow, SumUp::bytes(builder));
  const Segments segments(everything(spec), segment_elements(spec, steps(builder)));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion out = builder.out(segments[s]);
    const ScratchRing::Buffer to = inner ? sums.acquire(out.bytes) : ScratchRing::Buffer{out};
    const SumUp::Sum sum = up.add(segments[s], to.region, to.free);
    if (root) continue;
    const StepId sent = builder.send(place.parent, sum.region, {sum.ready});
    if (inner) sums.release(sent);
  }
}

void binomial_broadcast(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const TreePosition place = place_in_tree(builder.ranks(), builder.rank(), spec.root);
  const bool root = place.parent < 0;
  const Segments segments(everything(spec), segment_elements(spec, steps(builder)));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion here = root ? builder.in(segments[s]) : builder.out(segments[s]);
    const StepId ready = root ? kNoStep : builder.receive(place.parent, here);
    for (const TreeChild& child : place.children) builder.send(child.rank, here, {ready});
  }
  if (root) builder.copy(builder.in(everything(spec)), builder.out(everything(spec)), {}, spec.in_place);
}

void binomial_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const TreePosition place = place_in_tree(builder.ranks(), builder.rank(), spec.root);
  const auto& starts = spec.out_starts;
  const Slice own = part_of(spec, starts, builder.rank());
  if (place.children.empty()) {
    builder.send(place.parent, builder.in({0, own.count}));
    return;
  }
  const bool root = place.parent < 0;
  const Slice mine = parts_of(spec, starts, place.first, place.last);
  const BufferRegion all = root ? builder.out(mine) : builder.scratch(mine.count * builder.element_size());
  const auto at = [&](Slice slice) {
    return sub_region(all, (slice.offset - mine.offset) * builder.element_size(), slice.count * builder.element_size());
  };
  std::vector<StepId> here = {builder.copy(builder.in({0, own.count}), at(own), {}, root && spec.in_place)};
  for (const TreeChild& child : place.children)
    here.push_back(builder.receive(child.rank, at(parts_of(spec, starts, child.first, child.last))));
  if (root) return;
  const StepId sent = builder.send(place.parent, all);
  for (const StepId step : here) builder.wait(sent, step);
}

void binomial_scatter(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const TreePosition place = place_in_tree(builder.ranks(), builder.rank(), spec.root);
  const auto& starts = spec.in_starts;
  const Slice own = part_of(spec, starts, builder.rank());
  const BufferRegion out = builder.out({0, own.count});
  if (place.children.empty()) {
    builder.receive(place.parent, out);
    return;
  }
  const bool root = place.parent < 0;
  const Slice mine = parts_of(spec, starts, place.first, place.last);
  const BufferRegion all = root ? builder.in(mine) : builder.scratch(mine.count * builder.element_size());
  const StepId here = root ? kNoStep : builder.receive(place.parent, all);
  const auto at = [&](Slice slice) {
    return sub_region(all, (slice.offset - mine.offset) * builder.element_size(), slice.count * builder.element_size());
  };
  for (const TreeChild& child : place.children)
    builder.send(child.rank, at(parts_of(spec, starts, child.first, child.last)), {here});
  builder.copy(at(own), out, {here}, root && spec.in_place);
}

}  // namespace tessera::comm::schedules
