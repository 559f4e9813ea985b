// A step as a sequence of rows in words, made from trace events alone: of a simulation or of a real rank.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tools/explain/wrapping.h"

namespace tessera::tools {

/// The transfers that one unshard_issue or reduce_issue event has started.
struct IssuedTransfers {
  std::string operation;         ///< "all_gather"; of several the first
  std::uint64_t bytes_sent = 0;  ///< by this rank, in all of them
  int ranks = 1;                 ///< that the first one connects
  int rounds = 1;                ///< one after the other, over different ranks
  std::int64_t called_ns = 0;    ///< by the first one, on the clock of the events
  std::int64_t queued_ns = 0;    ///< from there to its first byte
};

/// One row of the story.
struct StoryRow {
  base::TraceEventKind kind = base::TraceEventKind::forward;
  std::string unit;
  std::int64_t at_ns = 0;                  ///< since the begin of the step
  std::string text;                        ///< "unshard h.0"
  std::string note;                        ///< why, or what it does
  std::optional<std::uint64_t> sent;       ///< bytes, by this rank
  std::optional<std::uint64_t> unsharded;  ///< bytes of unsharded parameters after it
  std::optional<std::int64_t> wait_ns;     ///< that compute waits
};

/// What happens to one unit in a step.
struct UnitStory {
  int unshards_before_backward = 0, unshards_in_backward = 0;
  int all_gathers_after_update = 0;
  bool resharded_after_forward = false;
  int reductions = 0;
};

/// The story of a step.
struct Story {
  std::vector<StoryRow> rows;
  std::vector<UnitStory> units;      ///< as in Wrapping::units()
  std::uint64_t most_unsharded = 0;  ///< bytes of unsharded parameters
  std::int64_t forward_end_ns = 0;   ///< since the begin of the step: the model has been computed once
  std::int64_t step_ns = 0;
};

/// The events and transfers of a step, whose times count from `begin_ns`.
struct StoryInput {
  const Wrapping& wrapping;
  std::span<const base::TraceEvent> events;  ///< in the order in which they began
  /// By event; empty for events that start nothing.
  std::span<const IssuedTransfers> issued;
  const fsdp::MeshShape& mesh;
  std::int64_t begin_ns = 0;
  std::int64_t step_ns = 0;
};

/// The event that started each transfer of a simulated step, as its index; nothing for those of no unit: order checks
/// and norms.
std::vector<std::optional<std::size_t>> starting_events(const StepPlan& step);

/// The transfers of a simulated step by the events that started them.
std::vector<IssuedTransfers> issued_transfers(const StepPlan& step);

Story make_story(const StoryInput& input);

}  // namespace tessera::tools
