// Builds one rank's schedule step by step.
#pragma once

#include <initializer_list>
#include <span>
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

}  // namespace tessera::comm
