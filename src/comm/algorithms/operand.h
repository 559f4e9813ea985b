// This rank's own input as an operand of partial sums.
#pragma once

#include <utility>
#include <vector>

#include "tessera/comm/algorithms/schedule_builder.h"

namespace tessera::comm {

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
