// Builds one rank's schedule step by step: the steps, the rank's own input as an operand of partial sums, and the tree
// of slices.h as messages, in which ranks exchange data at each node.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "tessera/comm/schedule.h"
#include "tessera/comm/slices.h"

namespace tessera::comm {

using StepId = std::uint32_t;
/// The id of an empty step, which needs no waiting.
inline constexpr StepId kNoStep = UINT32_MAX;
using Waits = std::initializer_list<StepId>;

/// Functions that add a step return kNoStep, and add none, if its region is empty; entries of Waits may be kNoStep. Two
/// ranks match their messages by count: each must add its sends to a peer in the order in which that peer adds its
/// receives.
class ScheduleBuilder {
 public:
  ScheduleBuilder(const CollectiveSpec& spec, std::string_view algorithm);

  const CollectiveSpec& spec() const { return spec_; }
  int ranks() const { return spec_.ranks; }
  int rank() const { return spec_.rank; }
  /// The rank `distance` positions further along the ring; negative: backward.
  int around(int distance) const { return ((rank() + distance) % ranks() + ranks()) % ranks(); }

  /// Elements of the call's buffers.
  BufferRegion in(Slice slice) const { return {BufferId::in, slice.offset * size_, slice.count * size_}; }
  BufferRegion out(Slice slice) const { return {BufferId::out, slice.offset * size_, slice.count * size_}; }
  /// Scratch memory of this schedule, aligned to a cache line.
  BufferRegion scratch(std::size_t bytes);
  std::size_t element_size() const { return size_; }

  StepId send(int peer, BufferRegion from, Waits waits = {});
  StepId receive(int peer, BufferRegion to, Waits waits = {});
  /// Empty messages, which only synchronize.
  StepId signal(int peer, Waits waits = {});
  StepId await(int peer, Waits waits = {});
  /// Adds no step if both regions are the same memory: pass `same` then.
  StepId copy(BufferRegion from, BufferRegion to, Waits waits = {}, bool same = false);
  StepId reduce(ReducePhase arithmetic, std::span<const BufferRegion> sources, BufferRegion to, Waits waits = {},
                BufferRegion factors = {});
  /// The whole operation, by the library below. Always adds a step.
  StepId native(BufferRegion from, BufferRegion to, Waits waits = {});
  /// Makes `step`, which must be the later one, wait for `earlier` too.
  void wait(StepId step, StepId earlier);

  /// This rank's factor of premul_sum in scratch, as reduce steps expect it, available after `ready`.
  BufferRegion own_factor(StepId& ready);

  Schedule finish() &&;

 private:
  StepId add(ScheduleStep step, Waits waits);

  struct Edge {
    StepId earlier;
    StepId later;
  };
  const CollectiveSpec& spec_;
  const std::size_t size_;
  Schedule schedule_;
  std::vector<Edge> edges_;
  std::vector<std::uint32_t> numbers_;  // messages so far: to each peer, then from each
  BufferRegion own_factor_;
  StepId own_factor_ready_ = kNoStep;
};

/// Part of `region`, in bytes.
inline BufferRegion sub_region(BufferRegion region, std::size_t offset, std::size_t bytes) {
  return {region.place, region.offset + offset, bytes};
}

/// A few scratch buffers used in rotation, so that scratch memory doesn't grow with the size of the call.
class ScratchRing {
 public:
  /// Creates at most `buffers`, and never more than `uses`.
  ScratchRing(ScheduleBuilder& builder, std::size_t buffers, std::size_t uses, std::size_t bytes);

  struct Buffer {
    BufferRegion region;
    StepId free = kNoStep;  ///< a step that writes the buffer must wait for this one
  };
  /// Acquires the next buffer in rotation.
  Buffer acquire(std::size_t bytes);
  /// The buffer acquired last is free again after `step`.
  void release(StepId step) { free_[last_] = step; }

 private:
  BufferRegion first_;
  std::size_t stride_ = 0;
  std::vector<StepId> free_;
  std::size_t last_ = 0;
};

/// A slice divided into segments of about equal length that a pipeline moves in turn.
class Segments {
 public:
  Segments(Slice whole, std::size_t most) : whole_(whole), count_((whole.count + most - 1) / most) {}
  std::size_t count() const { return count_; }
  Slice operator[](std::size_t index) const {
    const Slice slice = slice_of(whole_.count, static_cast<int>(count_), static_cast<int>(index));
    return {whole_.offset + slice.offset, slice.count};
  }

 private:
  Slice whole_;
  std::size_t count_;
};

/// Elements of a segment: large enough to hide the cost of a step, small enough to fill a pipeline quickly. Larger if
/// the schedule, with up to `steps` steps per segment of the call, would become too long. The same on all ranks.
std::size_t segment_elements(const CollectiveSpec& spec, std::size_t steps);

/// Maximum number of segments in flight if each needs scratch memory.
inline constexpr std::size_t kWindow = 4;

/// All elements; part `index` of `in`, of `out`; and the adjacent parts first .. last - 1 as one slice.
inline Slice everything(const CollectiveSpec& spec) { return {0, spec.count}; }
Slice part_of(const CollectiveSpec& spec, const std::vector<std::size_t>& starts, int index);
Slice parts_of(const CollectiveSpec& spec, const std::vector<std::size_t>& starts, int first, int last);

/// One end of an edge of the tree: a rank, and the ranks first .. last - 1 whose data it sends there.
struct TreeChild {
  int rank = 0;
  int first = 0;
  int last = 0;
  bool above = false;  ///< these are higher ranks than those that the parent has covered so far
};

/// A rank's position in the tree. The node of ranks a .. b is computed by `root` if it is one of them, else by a. With
/// a power of two of ranks and root 0 this is the binomial tree.
struct TreePosition {
  int parent = -1;  ///< -1: this is the root
  int first = 0;    ///< this rank sends the sum of first .. last - 1 to its parent
  int last = 0;
  std::vector<TreeChild> children;  ///< the largest first
};
TreePosition place_in_tree(int ranks, int rank, int root);

/// Divides the ranks into 2^levels groups of one or two neighbors, the tree's nodes at that depth, so that exchanges
/// between groups at distance 1, 2, 4, ... match its nodes exactly. The first rank of a group represents it.
struct PowerOfTwoGroups {
  PowerOfTwoGroups(int ranks, int rank);

  int levels = 0;
  int group = 0;       ///< index of this rank's group
  bool speaks = true;  ///< this rank represents its group; otherwise it only sends its data to its partner and receives
                       ///< the result
  int partner = -1;    ///< the other rank of its group, or -1
  int count() const { return 1 << levels; }
  /// The first rank of a group; for count(): the number of ranks.
  int first_rank(int index) const;
  /// The rank to exchange with at this level, and whether its group has the higher ranks.
  int peer(int level) const { return first_rank(group ^ (1 << level)); }
  bool peer_above(int level) const { return ((group >> level) & 1) == 0; }
  /// The first of the 2^level groups in this rank's node below `level`.
  int node(int level) const { return group >> level << level; }

 private:
  int ranks_;
};

/// Tracks how far consecutive steps have filled a buffer from its start (or from where they began).
class FilledPrefix {
 public:
  /// `step` fills up to element `end` and waits for the previous entry's step.
  void add(std::size_t end, StepId step) { ends_.emplace_back(end, step); }
  StepId last() const { return ends_.empty() ? kNoStep : ends_.back().second; }
  /// The step after which the whole slice is filled; kNoStep without entries.
  StepId ready(Slice slice) const;

 private:
  std::vector<std::pair<std::size_t, StepId>> ends_;
};

/// The input itself, or premul_sum's product if requested, which is computed first.
class Operand {
 public:
  /// The product is written to `out`, which then must have the same elements (Target::out), or to scratch memory as
  /// long as the input.
  enum class Target { out, scratch };
  Operand(ScheduleBuilder& builder, Target target);

  BufferRegion at(Slice slice) const;
  StepId ready(Slice slice) const { return scaled_.ready(slice); }
  const FilledPrefix& progress() const { return scaled_; }
  /// Whether the operand lies in `out`, which then must not be overwritten before the operand was added.
  bool in_out() const { return in_out_; }

 private:
  ScheduleBuilder& builder_;
  bool in_out_;
  BufferRegion product_;
  FilledPrefix scaled_;
};

/// The sources of a reduce step, the lower ranks' first.
struct OrderedPair {
  OrderedPair(BufferRegion own, BufferRegion other, bool other_is_above)
      : sources{other_is_above ? own : other, other_is_above ? other : own} {}
  operator std::span<const BufferRegion>() const { return sources; }  // NOLINT(google-explicit-constructor)
  BufferRegion sources[2];
};

}  // namespace tessera::comm
