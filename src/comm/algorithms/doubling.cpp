// Recursive doubling: groups of one or two ranks (schedule_builder.h) exchange all they have with the group at distance
// 1, then 2, 4, ...; with a power of two of ranks, each rank is its own group. In a group of two, one rank first sends
// its data to the other and finally receives the result from it.
#include <algorithm>
#include <bit>

#include "tessera/comm/algorithms/algorithms.h"

namespace tessera::comm::schedules {

void recursive_doubling_all_gather(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const auto& starts = spec.out_starts;
  const PowerOfTwoGroups groups(builder.ranks(), builder.rank());
  const Slice own = part_of(spec, starts, builder.rank());
  const BufferRegion in = builder.in({0, own.count});
  std::vector<StepId> here = {builder.copy(in, builder.out(own), {}, spec.in_place)};
  const auto out = [&](int first, int last) { return builder.out(parts_of(spec, starts, first, last)); };
  const auto send = [&](int peer, BufferRegion region) {
    const StepId sent = builder.send(peer, region);
    for (const StepId step : here) builder.wait(sent, step);
  };
  if (!groups.speaks) {
    builder.send(groups.partner, in);
    builder.receive(groups.partner, out(0, builder.rank()));
    builder.receive(groups.partner, out(builder.rank() + 1, builder.ranks()));
    return;
  }
  if (groups.partner >= 0) here.push_back(builder.receive(groups.partner, out(groups.partner, groups.partner + 1)));
  for (int level = 0; level < groups.levels; ++level) {
    const auto of_node = [&](int node) { return out(groups.first_rank(node), groups.first_rank(node + (1 << level))); };
    send(groups.peer(level), of_node(groups.node(level)));
    here.push_back(builder.receive(groups.peer(level), of_node(groups.node(level) ^ (1 << level))));
  }
  if (groups.partner < 0) return;
  send(groups.partner, out(0, groups.partner));
  send(groups.partner, out(groups.partner + 1, builder.ranks()));
}

namespace {

/// Reduces one segment at a time over all ranks.
class Doubling {
 public:
  Doubling(ScheduleBuilder& builder, std::size_t segments, std::size_t bytes)
      : builder_(builder),
        own_(builder, Operand::Target::out),
        groups_(builder.ranks(), builder.rank()),
        lanes_(std::min(segments, kWindow)) {
    if (!groups_.speaks) return;
    for (Lane& lane : lanes_)
      for (std::size_t i = 0; i < additions(); ++i)
        if (i + 1 < additions() || own_.in_out())
          lane.push_back({builder.scratch(bytes)});
        else
          lane.emplace_back();
  }

  void add_up(std::size_t index, Slice segment) {
    if (groups_.speaks) {
      exchange_sums(lanes_[index % lanes_.size()], segment);
    } else {
      builder_.send(groups_.partner, own_.at(segment), {own_.ready(segment)});
      // In place, this follows the send by causality: the result includes its data.
      builder_.receive(groups_.partner, builder_.out(segment));
    }
  }

 private:
  /// Where an operand is received, and the steps that must be done before the next segment's operand may be received
  /// there.
  struct Buffer {
    BufferRegion region;
    StepId sent = kNoStep;
    StepId added = kNoStep;
  };
  /// One buffer for each addition. Segments use a few lanes in rotation.
  using Lane = std::vector<Buffer>;

  bool pair() const { return groups_.partner >= 0; }
  std::size_t additions() const { return static_cast<std::size_t>(groups_.levels) + (pair() ? 1 : 0); }

  void exchange_sums(Lane& lane, Slice segment) {
    const BufferRegion out = builder_.out(segment);
    BufferRegion sum = own_.at(segment);
    StepId ready = own_.ready(segment);
    StepId first_sent = kNoStep;
    for (std::size_t i = 0; i < additions(); ++i) {
      const int level = static_cast<int>(i) - (pair() ? 1 : 0);
      const int peer = level < 0 ? groups_.partner : groups_.peer(level);
      const bool above = level < 0 || groups_.peer_above(level);
      const bool last = i + 1 == additions();
      // The new sum replaces the received operand, since the other operand is still being sent. The last one can be
      // received in `out`, unless that holds this rank's part.
      const bool straight = last && !own_.in_out();
      Buffer& buffer = lane[i];
      const BufferRegion come = straight ? out : sub_region(buffer.region, 0, out.bytes);
      const StepId sent = level < 0 ? kNoStep : builder_.send(peer, sum, {ready});
      const StepId received = builder_.receive(peer, come, {buffer.sent, buffer.added});
      if (i == 0) first_sent = sent;
      const BufferRegion to = last ? out : come;
      const StepId added = builder_.reduce(last ? ReducePhase::last : ReducePhase::partial,
                                           OrderedPair(sum, come, above), to, {received, ready});
      if (last && own_.in_out()) builder_.wait(added, first_sent);  // it replaces the data of that send
      if (i > 0) {
        lane[i - 1].sent = sent;
        lane[i - 1].added = added;
      }
      if (!straight) buffer.added = added;
      sum = to;
      ready = added;
    }
    if (pair()) builder_.send(groups_.partner, out, {ready});
  }

  ScheduleBuilder& builder_;
  const Operand own_;
  const PowerOfTwoGroups groups_;
  std::vector<Lane> lanes_;
};

/// For each segment: send, receive and add at every level.
std::size_t steps(const ScheduleBuilder& builder) {
  return 3 * static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(builder.ranks())));
}

}  // namespace

void recursive_doubling_all_reduce(ScheduleBuilder& builder) {
  const CollectiveSpec& spec = builder.spec();
  const std::size_t most = segment_elements(spec, steps(builder));
  const Segments segments(everything(spec), most);
  Doubling doubling(builder, segments.count(), std::min(most, spec.count) * builder.element_size());
  for (std::size_t s = 0; s < segments.count(); ++s) doubling.add_up(s, segments[s]);
}

}  // namespace tessera::comm::schedules
