// Operations without reductions, which move data directly from its source to its destination.
#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {

void direct_all_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice own = part_of(spec, spec.out_starts, builder.rank());
  for (int d = 1; d < builder.ranks(); ++d) {
    const int from = builder.around(-d);
    builder.send(builder.around(d), builder.in({0, own.count}));
    builder.receive(from, builder.out(part_of(spec, spec.out_starts, from)));
  }
  builder.copy(builder.in({0, own.count}), builder.out(own), {}, spec.in_place);
}

void direct_broadcast(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice all = everything(spec);
  if (builder.rank() != spec.root) {
    builder.receive(spec.root, builder.out(all));
    return;
  }
  for (int d = 1; d < builder.ranks(); ++d) builder.send(builder.around(d), builder.in(all));
  builder.copy(builder.in(all), builder.out(all), {}, spec.in_place);
}

void direct_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice own = part_of(spec, spec.out_starts, builder.rank());
  const BufferRegion in = builder.in({0, own.count});
  if (builder.rank() != spec.root) {
    builder.send(spec.root, in);
    return;
  }
  for (int d = 1; d < builder.ranks(); ++d) {
    const int from = builder.around(d);
    builder.receive(from, builder.out(part_of(spec, spec.out_starts, from)));
  }
  builder.copy(in, builder.out(own), {}, spec.in_place);
}

void direct_scatter(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const Slice own = part_of(spec, spec.in_starts, builder.rank());
  const BufferRegion out = builder.out({0, own.count});
  if (builder.rank() != spec.root) {
    builder.receive(spec.root, out);
    return;
  }
  for (int d = 1; d < builder.ranks(); ++d) {
    const int to = builder.around(d);
    builder.send(to, builder.in(part_of(spec, spec.in_starts, to)));
  }
  builder.copy(builder.in(own), out, {}, spec.in_place);
}

namespace {

/// `one_at_a_time`: each exchange waits for the previous one.
void exchange_all(ScheduleBuilder& builder, bool one_at_a_time) {
  const CollectiveSpec& spec = builder.spec();
  StepId sent = kNoStep;
  StepId received = kNoStep;
  for (int d = 1; d < builder.ranks(); ++d) {
    const int to = builder.around(d);
    const int from = builder.around(-d);
    const BufferRegion chunk = builder.in(part_of(spec, spec.in_starts, to));
    const BufferRegion place = builder.out(part_of(spec, spec.out_starts, from));
    const StepId send = builder.send(to, chunk, {sent, received});
    const StepId receive = builder.receive(from, place, {sent, received});
    if (!one_at_a_time) continue;
    if (send != kNoStep || receive != kNoStep) {
      sent = send;
      received = receive;
    }
  }
  builder.copy(builder.in(part_of(spec, spec.in_starts, builder.rank())),
               builder.out(part_of(spec, spec.out_starts, builder.rank())));
}

}  // namespace

void direct_all_to_all(ScheduleBuilder& builder) { exchange_all(builder, false); }
void pairwise_all_to_all(ScheduleBuilder& builder) { exchange_all(builder, true); }

/// In round k every rank notifies the rank 2^k further that 2^k ranks have arrived: itself, and those that it knows of.
void dissemination_barrier(ScheduleBuilder& builder) {
  std::vector<StepId> received;
  for (int distance = 1; distance < builder.ranks(); distance *= 2) {
    const StepId sent = builder.signal(builder.around(distance));
    for (const StepId step : received) builder.wait(sent, step);
    received.push_back(builder.await(builder.around(-distance)));
  }
}

}  // namespace tessera::comm::schedules
