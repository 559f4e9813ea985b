// This rank's own input as an operand of partial sums.
#pragma once

#include <utility>
#include <vector>

#include "tessera/comm/algorithms/schedule_builder.h"

namespace tessera::comm {

/// How far steps that follow each other have filled a buffer from its start (or from where they began).
class FilledPrefix {
 public:
  /// `step` fills up to element `end`, and waits for the one noted before.
  void note(std::size_t end, StepId step) { ends_.emplace_back(end, step); }
  StepId last() const { return ends_.empty() ? kNoStep : ends_.back().second; }
  /// After which step all of the slice is there; kNoStep where nothing was noted.
  StepId ready(Slice slice) const;

 private:
  std::vector<std::pair<std::size_t, StepId>> ends_;
};

/// The input itself; premul_sum's product where that is asked for, which is made first.
class Operand {
 public:
  /// The product is written to `out`, which has the same elements then (Target::out), or to scratch memory as long as
  /// the input.
  enum class Target { out, scratch };
  Operand(ScheduleBuilder& builder, Target target);

  BufferRegion at(Slice slice) const;
  StepId ready(Slice slice) const { return scaled_.ready(slice); }
  const FilledPrefix& progress() const { return scaled_; }
  /// Whether it lies in `out`, so that nothing else may be put there before it was added.
  bool in_out() const { return in_out_; }

 private:
  ScheduleBuilder& builder_;
  bool in_out_;
  BufferRegion product_;
  FilledPrefix scaled_;
};

/// The sources of a reduce step, that of the lower ranks first.
struct OrderedPair {
  OrderedPair(BufferRegion own, BufferRegion other, bool other_is_above)
      : sources{other_is_above ? own : other, other_is_above ? other : own} {}
  operator std::span<const BufferRegion>() const { return sources; }  // NOLINT(google-explicit-constructor)
  BufferRegion sources[2];
};

}  // namespace tessera::comm
