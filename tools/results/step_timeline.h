// One step of a run over time: what the ranks did, and the memory that each used, which compare.json holds as
// `timeline`; and how long each part of a rank's step took.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/json/json_reader.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/base/trace.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::tools {

/// Live bytes at one time.
struct MemorySample {
  std::int64_t at_ns = 0;
  std::array<std::int64_t, base::kMemoryUses> bytes{};  ///< by base::MemoryCategory
  std::int64_t total() const;                           ///< without offloaded bytes, which are in another memory
};

/// An operation of a simulated step.
struct Transfer {
  base::TransferEvent times;
  std::size_t started_by = 0;  ///< index in RankTimeline::events
};

/// Times count from the begin of the step.
struct RankTimeline {
  int rank = 0;
  std::vector<base::TraceEvent> events;  ///< in the order in which they began
  std::vector<Transfer> transfers;       ///< where their times are known: in a simulation
  std::vector<MemorySample> memory;      ///< each holds until the next; empty if memory was not sampled
};

struct StepTimeline {
  std::int64_t step = 0;  ///< its number, from 1
  std::int64_t length_ns = 0;
  bool simulated = false;  ///< times are those of the simulated machine
  bool one_clock = true;   ///< false: the ranks' clocks differ, and each rank's times count from its own begin
  /// Into how many parts the parameters, the gradients and the optimizer state of a unit are sharded at rest.
  std::array<int, 3> pieces = {1, 1, 1};
  std::uint64_t predicted_state = 0;  ///< bytes of model state by ZeRO's formula; 0: it does not apply
  std::vector<RankTimeline> ranks;
};

/// Of a rank: more are narrower than a pixel.
inline constexpr std::size_t kMostSamples = 400;

/// The length of all that these times, each from a begin to an end, cover: what lies in several counts once.
std::int64_t covered_ns(std::vector<std::pair<std::int64_t, std::int64_t>> spans);

/// The samples of a history between two times, with `begin_ns` subtracted: at most `most`, the highest sum among them.
std::vector<MemorySample> samples_of(const base::MemoryHistory& history, std::int64_t begin_ns, std::size_t most);

/// Chrome's trace format; see base::write_chrome_trace().
std::string chrome_trace(std::span<const base::TraceEvent> events, std::span<const base::TransferEvent> transfers = {});

/// Compact: events are arrays [kind, unit, start, length, bytes], kinds and units indices of lists, times nanoseconds;
/// transfers are [operation, axis, bytes sent, called, begun, done, index of the event that started it].
nlohmann::ordered_json to_json(const StepTimeline& timeline);
/// Reads what to_json() wrote. Throws InvalidUsage that names what is missing or out of range.
StepTimeline parse_timeline(const base::JsonReader& json);

/// A rank's step, cut without gaps into what its compute thread did: milliseconds. The first seven add up to the step,
/// from its batch to the end of its update.
struct StepParts {
  double compute = 0;    ///< forward and backward, without what lies inside them
  double optimizer = 0;  ///< the update
  double issue = 0;      ///< submitting operations, and copies before and after them
  double late = 0;       ///< waits until the last rank had called the operation
  double exposed = 0;    ///< then until the links had passed it
  double transport = 0;  ///< then until this thread went on
  double rest = 0;       ///< everything else
  double volume = 0;     ///< the bytes of the step's operations over the rate of the links
  double latency = 0;    ///< of their messages in a row

  double step() const { return compute + optimizer + issue + late + exposed + transport + rest; }
  /// Of volume and latency, what no wait of this step shows.
  double hidden() const { return volume + latency - exposed; }
};

/// The names of the parts.
inline constexpr std::array<std::pair<const char*, double StepParts::*>, 9> kStepParts = {{
    {"compute", &StepParts::compute},
    {"optimizer", &StepParts::optimizer},
    {"issue", &StepParts::issue},
    {"late", &StepParts::late},
    {"exposed", &StepParts::exposed},
    {"transport", &StepParts::transport},
    {"rest", &StepParts::rest},
    {"volume", &StepParts::volume},
    {"latency", &StepParts::latency},
}};

/// Whether computing waits for communication in this event.
bool is_wait(const base::TraceEvent& event);
std::int64_t exposed_ns(std::span<const base::TraceEvent> events);  ///< length of all such waits

/// Cuts the step from `begin_ns` to `end_ns`. `events` are of one thread, in the order they were begun, and nested, as
/// TraceRecorder returns them; so are the waits of `link`, innermost. What lies outside of the step is left out.
StepParts cut_step(std::int64_t begin_ns, std::int64_t end_ns, std::span<const base::TraceEvent> events,
                   const comm::LinkRecord& link);

/// Part by part; zeros if there are none.
StepParts mean_of(std::span<const StepParts> parts);

nlohmann::ordered_json to_json(const StepParts& parts);
/// Throws InvalidUsage.
StepParts parse_step_parts(const base::JsonReader& json);

}  // namespace tessera::tools
