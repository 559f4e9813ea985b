#include "tools/results/what_if.h"

namespace tessera::tools {

using nlohmann::ordered_json;

ordered_json link_json(const LinkSpec& link) {
  return {{"latency_us", link.latency_us}, {"bytes_per_second", link.bytes_per_second}};
}

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

}  // namespace tessera::tools
