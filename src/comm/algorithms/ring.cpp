// The ring: rank r receives from r - 1 and sends to r + 1. Block b starts at rank b + 1, goes once around, accumulates
// every rank's part and is complete at rank b; for all_reduce and all_gather it then goes around a second time.
// Segments of a block move separately, so that one is added while the next one is in flight.
#include <algorithm>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {
namespace {

/// The block that reaches this rank after `stop` hops.
int block_at(const ScheduleBuilder& builder, int stop) { return builder.around(-1 - stop); }

}  // namespace

void ring_all_reduce(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const int ranks = builder.ranks();
  const int left = builder.around(-1);
  const int right = builder.around(1);
  const std::size_t most = segment_elements(spec, 5);
  const auto segments_at = [&](int stop) { return Segments(part_of(spec, {}, block_at(builder, stop)), most); };
  const Operand own(builder, Operand::Target::out);
  // Partial sums are received in `out`, the result's place; in place, not before this rank's own part was added.
  const std::size_t largest = std::min(most, part_of(spec, {}, 0).count) * builder.element_size();
  ScratchRing window(builder, own.in_out() ? kWindow : 0, kWindow, largest);
  for (int stop = 0; stop < ranks; ++stop) {
    const Segments segments = segments_at(stop);
    for (std::size_t s = 0; s < segments.count(); ++s) {
      const Slice segment = segments[s];
      const BufferRegion sum = builder.out(segment);
      if (stop == 0) {
        builder.send(right, own.at(segment), {own.ready(segment)});
        continue;
      }
      const ScratchRing::Buffer buffer = own.in_out() ? window.acquire(sum.bytes) : ScratchRing::Buffer{sum};
      const StepId received = builder.receive(left, buffer.region, {buffer.free});
      const StepId added =
          builder.reduce(stop == ranks - 1 ? ReducePhase::last : ReducePhase::partial,
                         OrderedPair(own.at(segment), buffer.region, false), sum, {received, own.ready(segment)});
      if (own.in_out()) window.release(added);
      builder.send(right, sum, {added});
    }
  }
  // These receives overwrite data sent before. The sends are complete by causality: the complete sum has gone all the
  // way around, past the right neighbor that received that data.
  for (int stop = ranks; stop < 2 * ranks - 1; ++stop) {
    const Segments segments = segments_at(stop);
    for (std::size_t s = 0; s < segments.count(); ++s) {
      const StepId received = builder.receive(left, builder.out(segments[s]));
      if (stop < 2 * ranks - 2) builder.send(right, builder.out(segments[s]), {received});
    }
  }
}

void ring_reduce_scatter(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const int ranks = builder.ranks();
  const int left = builder.around(-1);
  const int right = builder.around(1);
  const std::size_t most = segment_elements(spec, 3);
  const Slice result = part_of(spec, spec.in_starts, builder.rank());
  const Operand own(builder, Operand::Target::scratch);
  std::size_t rounds = 0;
  std::size_t uses = 0;
  std::size_t largest = 0;
  for (int b = 0; b < ranks; ++b) {
    const Segments segments(part_of(spec, spec.in_starts, b), most);
    if (segments.count() == 0) continue;
    rounds = std::max(rounds, (segments.count() + kWindow - 1) / kWindow);
    uses += segments.count();
    largest = std::max(largest, segments[0].count * builder.element_size());
  }
  // Sums need memory until they are sent. Blocks go around in rounds of kWindow segments each, with buffers for two
  // stops of a round: only stops after the destination of a buffer's data wait for the buffer, so the waits can't form
  // a cycle.
  ScratchRing window(builder, 2 * kWindow, uses, largest);
  for (std::size_t round = 0; round < rounds; ++round)
    for (int stop = 0; stop < ranks; ++stop) {
      const Segments segments(part_of(spec, spec.in_starts, block_at(builder, stop)), most);
      const std::size_t end = std::min((round + 1) * kWindow, segments.count());
      for (std::size_t s = round * kWindow; s < end; ++s) {
        const Slice segment = segments[s];
        if (stop == 0) {
          builder.send(right, own.at(segment), {own.ready(segment)});
          continue;
        }
        const BufferRegion part = own.at(segment);
        const ScratchRing::Buffer buffer = window.acquire(part.bytes);
        const StepId received = builder.receive(left, buffer.region, {buffer.free});
        const OrderedPair sources(part, buffer.region, false);
        if (stop == ranks - 1) {
          const BufferRegion sum = builder.out({segment.offset - result.offset, segment.count});
          window.release(builder.reduce(ReducePhase::last, sources, sum, {received, own.ready(segment)}));
        } else {
          const StepId added =
              builder.reduce(ReducePhase::partial, sources, buffer.region, {received, own.ready(segment)});
          window.release(builder.send(right, buffer.region, {added}));
        }
      }
    }
}

/// Every rank starts with its own part and forwards what it receives; after n - 1 stops every rank has all parts.
void ring_all_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice own = part_of(spec, spec.out_starts, builder.rank());
  const BufferRegion in = builder.in({0, own.count});
  StepId here = kNoStep;
  for (int stop = 0; stop < builder.ranks(); ++stop) {
    const BufferRegion part = builder.out(part_of(spec, spec.out_starts, builder.around(-stop)));
    if (stop > 0) here = builder.receive(builder.around(-1), part);
    if (stop < builder.ranks() - 1) builder.send(builder.around(1), stop == 0 ? in : part, {here});
  }
  builder.copy(in, builder.out(own), {}, spec.in_place);
}

void pipelined_broadcast(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const bool first = builder.rank() == spec.root;
  const bool last = builder.around(1) == spec.root;
  const Segments segments(everything(spec), segment_elements(spec, 2));
  for (std::size_t s = 0; s < segments.count(); ++s) {
    const BufferRegion out = builder.out(segments[s]);
    const StepId here = first ? kNoStep : builder.receive(builder.around(-1), out);
    if (!last) builder.send(builder.around(1), first ? builder.in(segments[s]) : out, {here});
  }
  if (first) builder.copy(builder.in(everything(spec)), builder.out(everything(spec)), {}, spec.in_place);
}

}  // namespace tessera::comm::schedules
