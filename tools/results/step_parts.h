// A rank's step, cut without gaps into what its compute thread did.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

#include "tessera/base/json/json_reader.h"
#include "tessera/base/trace.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::tools {

/// Milliseconds. The first seven add up to the step: from its batch to the end of its update.
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
