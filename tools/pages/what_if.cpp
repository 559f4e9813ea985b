#include "tools/pages/what_if.h"

#include <cmath>

#include "tools/pages/html.h"
#include "tools/pages/live.h"

namespace tessera::tools::pages {
namespace {

/// How far each simulated step is from the measured one.
std::string distances_of(const WhatIf& what_if) {
  if (!what_if.link_given)
    return "The runs had no --link, so their links are not known, and the simulated steps can't be compared with the "
           "measured ones. ";
  std::string text;
  for (const WhatIf::Run& run : what_if.runs) {
    if (!run.left_out.empty() || run.measured_ms <= 0) continue;
    const double percent = std::round((run.simulated_ms / run.measured_ms - 1) * 100);
    text += (text.empty() ? "" : ", ") + run.name + " " + (percent < 0 ? "\u2212" : "+") +
            significant(std::abs(percent), 3) + " %";
  }
  return text.empty() ? "" : "In the setting of the runs, simulated steps differ from measured ones by: " + text + ". ";
}

Table steps_of(const WhatIf& what_if) {
  Table table{"Milliseconds of a step in the setting of the runs", {"strategy", "measured", "simulated"}, {}};
  for (const WhatIf::Run& run : what_if.runs)
    table.rows.push_back({run.name, significant(run.measured_ms, 5),
                          run.left_out.empty() ? significant(run.simulated_ms, 5) : "left out: " + run.left_out});
  return table;
}

}  // namespace

std::string what_if_section(const WhatIf& what_if) {
  std::string html =
      "<h2>What if</h2>\n<p>A simulation: the strategies in the order of their own calls, over links of which each " +
      defined("rank") + " has a port that its operations pass one after the other. Forward, backward and " +
      defined("optimizer") + " take as long as they did here: " + escape(what_if.machine) + " a rank. " +
      escape(distances_of(what_if)) + "</p>\n";
  for (const WhatIf::Run& run : what_if.runs)
    if (!run.left_out.empty())
      html += "<p>" + escape(run.name + " is left out: " + run.left_out) + ".</p>\n";
    else if (!run.memory_known)
      html += "<p>" +
              escape("The memory of " + run.name + " is left out: it does not grow in proportion to the tokens") +
              ".</p>\n";
  return html + place_for("what-if") + details("Simulated and measured steps", steps_of(what_if));
}

}  // namespace tessera::tools::pages
