// Recursive halving: at distance 1, 2, 4, ... each rank sends half of its partial sums to its partner and receives the
// partner's part of the other half, until the result is divided into equal parts. Groups of two as in doubling.cpp.
#include <algorithm>
#include <functional>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {
namespace {

// For each segment: send, receive and add over all levels, and the same within a group of two.
constexpr std::size_t kSteps = 6;

using Place = std::function<BufferRegion(Slice)>;

/// This rank's partial sums, over fewer elements at every level.
class PartialSums {
 public:
  /// Its own part lies at `own` and is available as `ready` says. The first sum of an element goes to `sum`, where it
  /// stays; the peer's part is received there too, unless it is the same memory (`same`).
  PartialSums(ScheduleBuilder& builder, Place own, Place sum, bool same, FilledPrefix ready)
      : builder_(builder),
        own_(std::move(own)),
        sum_(std::move(sum)),
        same_(same),
        ready_(std::move(ready)),
        most_(segment_elements(builder.spec(), kSteps)),
        window_(builder, kWindow, SIZE_MAX, std::min(most_, builder.spec().count) * builder.element_size()) {}

  void send(int peer, Slice slice) {
    const Segments segments(slice, most_);
    for (std::size_t s = 0; s < segments.count(); ++s)
      builder_.send(peer, own_(segments[s]), {ready_.ready(segments[s])});
  }
  /// Adds the data from `peer`; `above`: the peer represents higher ranks. The sums go to `to`.
  void receive(int peer, Slice slice, bool above, ReducePhase arithmetic, const Place& to) {
    const Segments segments(slice, most_);
    for (std::size_t s = 0; s < segments.count(); ++s) {
      const Slice segment = segments[s];
      const BufferRegion own = own_(segment);
      const ScratchRing::Buffer come = same_ ? window_.acquire(own.bytes) : ScratchRing::Buffer{to(segment)};
      const StepId received = builder_.receive(peer, come.region, {come.free});
      const StepId added = builder_.reduce(arithmetic, OrderedPair(own, come.region, above), to(segment),
                                           {received, ready_.ready(segment), next_.last()});
      if (same_) window_.release(added);
      next_.add(segment.offset + segment.count, added);
    }
  }
  void receive(int peer, Slice slice, bool above) { receive(peer, slice, above, ReducePhase::partial, sum_); }
  /// Everything of this level was received: the sums replace this rank's part.
  void next_level() {
    own_ = sum_;
    same_ = true;
    ready_ = std::move(next_);
    next_ = {};
  }
  StepId last() const { return ready_.last(); }

 private:
  ScheduleBuilder& builder_;
  Place own_;
  Place sum_;
  bool same_;
  FilledPrefix ready_;
  FilledPrefix next_;
  const std::size_t most_;
  ScratchRing window_;
};

/// The parts of `slice` that this rank and its partner keep at a level.
struct Halves {
  Halves(Slice slice, std::size_t lower, bool keeps_lower) {
    const Slice first{slice.offset, lower};
    const Slice second{slice.offset + lower, slice.count - lower};
    kept = keeps_lower ? first : second;
    given = keeps_lower ? second : first;
  }
  Slice kept;
  Slice given;
};

}  // namespace

void rabenseifner_all_reduce(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const PowerOfTwoGroups groups(builder.ranks(), builder.rank());
  const Operand own(builder, Operand::Target::out);
  const Slice all = everything(spec);
  const Segments segments(all, segment_elements(spec, kSteps));
  const Place out = [&](Slice slice) { return builder.out(slice); };
  if (!groups.speaks) {
    for (std::size_t s = 0; s < segments.count(); ++s)
      builder.send(groups.partner, own.at(segments[s]), {own.ready(segments[s])});
    builder.receive(groups.partner, builder.out(all));  // after the sends by causality: it includes their data
    return;
  }
  PartialSums sums(
      builder, [&](Slice slice) { return own.at(slice); }, out, own.in_out(), own.progress());
  if (groups.partner >= 0) {
    sums.receive(groups.partner, all, true);
    sums.next_level();
  }
  std::vector<Halves> levels;
  Slice range = all;
  for (int level = 0; level < groups.levels; ++level) {
    const bool above = groups.peer_above(level);
    const Halves& halves = levels.emplace_back(range, (range.count + 1) / 2, above);
    sums.send(groups.peer(level), halves.given);
    sums.receive(groups.peer(level), halves.kept, above,
                 level + 1 == groups.levels ? ReducePhase::last : ReducePhase::partial, out);
    sums.next_level();
    range = halves.kept;
  }
  // Back: each half sent away returns complete from the same partner, hence after the sends by causality.
  std::vector<StepId> here = {sums.last()};
  const auto send = [&](int peer, Slice slice) {
    const StepId sent = builder.send(peer, builder.out(slice));
    for (const StepId step : here) builder.wait(sent, step);
  };
  for (int level = groups.levels - 1; level >= 0; --level) {
    const Halves& halves = levels[static_cast<std::size_t>(level)];
    send(groups.peer(level), halves.kept);
    here.push_back(builder.receive(groups.peer(level), builder.out(halves.given)));
  }
  if (groups.partner >= 0) send(groups.partner, all);
}

namespace {

/// The groups' blocks in the order in which halving by distance 1, 2, 4, ... separates them: sorted by the bits of the
/// group's index from the lowest up.
class Order {
 public:
  Order(const CollectiveSpec& spec, const PowerOfTwoGroups& groups) : starts_(1, 0) {
    for (int position = 0; position < groups.count(); ++position) {
      int group = 0;
      for (int bit = 0; bit < groups.levels; ++bit) group |= ((position >> bit) & 1) << (groups.levels - 1 - bit);
      const Slice block = parts_of(spec, spec.in_starts, groups.first_rank(group), groups.first_rank(group + 1));
      blocks_.push_back(block);
      starts_.push_back(starts_.back() + block.count);
    }
  }
  /// A block in `in`, and blocks first .. last - 1 in this order.
  Slice block(int position) const { return blocks_[static_cast<std::size_t>(position)]; }
  Slice range(int first, int last) const {
    const std::size_t start = starts_[static_cast<std::size_t>(first)];
    return {start, starts_[static_cast<std::size_t>(last)] - start};
  }

 private:
  std::vector<Slice> blocks_;
  std::vector<std::size_t> starts_;
};

/// For the rank of a pair that doesn't represent it: sends in the order in which its partner adds.
void send_to_partner(ScheduleBuilder& builder, const PowerOfTwoGroups& groups, const Order& order, const Operand& own) {
  for (int position = 0; position < groups.count(); ++position) {
    const Segments segments(order.block(position), segment_elements(builder.spec(), kSteps));
    for (std::size_t s = 0; s < segments.count(); ++s)
      builder.send(groups.partner, own.at(segments[s]), {own.ready(segments[s])});
  }
  // In place this can't overlap the sends, by causality: it includes their data.
  builder.receive(groups.partner,
                  builder.out({0, part_of(builder.spec(), builder.spec().in_starts, builder.rank()).count}));
}

}  // namespace

void recursive_halving_reduce_scatter(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const std::size_t size = builder.element_size();
  const PowerOfTwoGroups groups(builder.ranks(), builder.rank());
  const Order order(spec, groups);
  const Operand own(builder, Operand::Target::scratch);
  if (!groups.speaks) return send_to_partner(builder, groups, order, own);
  const BufferRegion scratch = builder.scratch(spec.count * size);
  const Place sorted = [&](Slice slice) { return sub_region(scratch, slice.offset * size, slice.count * size); };
  FilledPrefix copied;
  for (int position = 0; position < groups.count(); ++position) {
    const Slice block = order.block(position);
    const Slice to = order.range(position, position + 1);
    if (block.count == 0) continue;
    copied.add(to.offset + to.count, builder.copy(own.at(block), sorted(to), {own.ready(block), copied.last()}));
  }
  PartialSums sums(builder, sorted, sorted, true, std::move(copied));
  if (groups.partner >= 0) {
    for (int position = 0; position < groups.count(); ++position)
      sums.receive(groups.partner, order.range(position, position + 1), true);
    sums.next_level();
  }
  const Slice mine = part_of(spec, spec.in_starts, builder.rank());
  int first = 0;
  int blocks = groups.count();
  for (int level = 0; level < groups.levels; ++level) {
    const bool above = groups.peer_above(level);
    const bool last = level + 1 == groups.levels;
    blocks /= 2;
    const Halves halves(order.range(first, first + 2 * blocks), order.range(first, first + blocks).count, above);
    if (!above) first += blocks;
    sums.send(groups.peer(level), halves.given);
    // A rank that is its own group adds directly into the result's place.
    const Place out = [&](Slice slice) { return builder.out({slice.offset - halves.kept.offset, slice.count}); };
    sums.receive(groups.peer(level), halves.kept, above, last ? ReducePhase::last : ReducePhase::partial,
                 last && groups.partner < 0 ? out : sorted);
    sums.next_level();
  }
  if (groups.partner < 0) return;
  const Slice both = order.range(first, first + 1);
  builder.copy(sorted({both.offset, mine.count}), builder.out({0, mine.count}), {sums.last()});
  builder.send(groups.partner, sorted({both.offset + mine.count, both.count - mine.count}), {sums.last()});
}

}  // namespace tessera::comm::schedules
