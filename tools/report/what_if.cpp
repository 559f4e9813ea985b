#include "tools/report/what_if.h"

#include <cmath>

#include "tools/report/html.h"
#include "tools/report/live.h"

namespace tessera::tools::report {
namespace {

using nlohmann::ordered_json;

ordered_json link_json(const LinkSpec& link) {
  return {{"latency_us", link.latency_us}, {"bytes_per_second", link.bytes_per_second}};
}
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

ordered_json to_json(const WhatIf& w) {
  ordered_json runs = ordered_json::array();
  for (const WhatIf::Run& run : w.runs)
    runs.push_back({{"name", run.name},
                    {"strategy", run.strategy},
                    {"measured_ms", run.measured_ms},
                    {"simulated_ms", run.simulated_ms},
                    {"memory_known", run.memory_known},
                    {"left_out", run.left_out},
                    {"schedules", run.schedules}});
  return {{"machine", w.machine},
          {"flops", w.flops},
          {"parameter_bytes", w.parameter_bytes},
          {"link_given", w.link_given},
          {"setting",
           {{"link", link_json(w.setting.link)},
            {"intra", link_json(w.setting.intra)},
            {"ranks", w.setting.ranks},
            {"hosts", w.setting.hosts},
            {"sequences", w.setting.sequences}}},
          {"seq_len", w.seq_len},
          {"microbatches", w.microbatches},
          {"most_sequences", w.most_sequences},
          {"command", w.command},
          {"runs", runs}};
}

LinkSpec link_at(const base::JsonReader& json) {
  return {json.at("latency_us").number(0, 1e15), json.at("bytes_per_second").number(0, 1e30)};
}

WhatIf parse_what_if(const base::JsonReader& json) {
  WhatIf w{.machine = json.at("machine"),
           .flops = json.at("flops"),
           .parameter_bytes = json.at("parameter_bytes"),
           .link_given = json.at("link_given")};
  const base::JsonReader setting = json.at("setting");
  constexpr int kMost = 1 << 20;
  w.setting = {link_at(setting.at("link")), link_at(setting.at("intra")),
               static_cast<int>(setting.at("ranks").integer(1, kMost)),
               static_cast<int>(setting.at("hosts").integer(1, kMost)), setting.at("sequences").integer(1)};
  w.seq_len = json.at("seq_len").integer(1);
  w.microbatches = json.at("microbatches").integer(1);
  w.most_sequences = json.at("most_sequences").integer(1);
  w.command = json.at("command").get<std::vector<std::string>>();
  for (const base::JsonReader& run : json.at("runs").elements())
    w.runs.push_back({run.at("name"), run.at("strategy"), run.at("measured_ms"), run.at("simulated_ms"),
                      run.at("schedules").json(), run.at("memory_known"), run.at("left_out")});
  return w;
}

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

}  // namespace tessera::tools::report
