// The pages of `tessera bench --report`.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <vector>

#include "tessera/base/parse.h"
#include "tools/bench/baseline.h"
#include "tools/bench/environment.h"
#include "tools/bench/output.h"
#include "tools/bench/pattern.h"
#include "tools/cli/output.h"
#include "tools/pages/page.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using pages::escape;
using pages::significant;

/// The times of one backend in one run, out of place, by size.
struct Curve {
  std::string name;
  const BenchRun* run = nullptr;
  std::vector<BenchResult> points;
};

std::string paragraph(const std::string& text, const char* kind = "soft") {
  return fmt::format("<p class=\"{}\">{}</p>\n", kind, escape(text));
}

ordered_json list_in(const ordered_json& json, const char* name) { return json.value(name, ordered_json::array()); }

/// Which times are drawn in one picture.
std::string table_name(const ordered_json& row) {
  const std::string redop = row.value("redop", "none");
  return fmt::format("{}, {}{}", row.at("op").get<std::string>(), row.at("dtype").get<std::string>(),
                     redop == "none" ? "" : ", " + redop);
}

/// As in the legend: the backend, after its run if there are several.
std::string curve_name(std::span<const BenchRun> runs, const BenchRun& run, const ordered_json& row) {
  return (runs.size() > 1 ? run.name + ": " : "") + row.at("backend").get<std::string>();
}

/// By picture, in the order of the results.
std::vector<std::pair<std::string, std::vector<Curve>>> bench_curves_of(std::span<const BenchRun> runs) {
  std::vector<std::pair<std::string, std::vector<Curve>>> tables;
  const auto at = [](auto& list, const std::string& name, auto key) -> auto& {
    const auto found = std::ranges::find(list, name, key);
    if (found != list.end()) return *found;
    list.emplace_back();
    list.back().*key = name;
    return list.back();
  };
  for (const BenchRun& run : runs)
    for (const ordered_json& row : run.json.at("results")) {
      auto& table = at(tables, table_name(row), &std::pair<std::string, std::vector<Curve>>::first);
      if (row.at("in_place").get<bool>()) continue;
      Curve& curve = at(table.second, curve_name(runs, run, row), &Curve::name);
      curve.run = &run;
      curve.points.push_back(bench_result_from_json(row));
    }
  for (auto& [name, curves] : tables)
    for (Curve& curve : curves) std::ranges::stable_sort(curve.points, {}, &BenchResult::bytes);
  return tables;
}

/// The curve with the least time at each size that all have, as ranges: ends of each, and its name.
struct Fastest {
  std::uint64_t from = 0, to = 0;
  std::string name;
};
std::vector<Fastest> fastest_of(const std::vector<Curve>& curves) {
  std::map<std::uint64_t, std::vector<std::pair<double, std::string>>> by_size;
  for (const Curve& curve : curves)
    for (const BenchResult& r : curve.points) by_size[r.bytes].emplace_back(r.time_us.median, curve.name);
  std::vector<Fastest> ranges;
  for (const auto& [bytes, times] : by_size) {
    if (times.size() < curves.size()) continue;
    const std::string name = std::ranges::min(times).second;
    if (ranges.empty() || ranges.back().name != name) ranges.push_back({bytes, bytes, name});
    ranges.back().to = bytes;
  }
  return ranges;
}

/// The data of drawCurves() in live/curves.js.
ordered_json curves_json(const std::vector<Curve>& curves, const std::vector<Fastest>& fastest) {
  ordered_json lines = ordered_json::array(), crossings = ordered_json::array();
  for (const Curve& curve : curves) {
    ordered_json points = ordered_json::array(), fit;
    for (const BenchResult& r : curve.points)
      if (r.bytes > 0 && r.time_us.median > 0)
        points.push_back({{"bytes", r.bytes},
                          {"us", r.time_us.median},
                          {"min", r.time_us.min},
                          {"p99", r.time_us.p99},
                          {"bound", r.bound_us},
                          {"busbw", r.busbw_gbps},
                          {"algorithm", r.algorithm},
                          {"noisy", r.noisy}});
    for (const ordered_json& one : list_in(curve.run->json, "fits"))
      if (!curve.points.empty() && one.at("backend") == curve.points.front().backend &&
          table_name(one) == table_name(to_json(curve.points.front())))
        fit = {{"alpha_us", one.at("alpha_us").get<double>()},
               {"us_per_byte", one.at("beta_us_per_mib").get<double>() / 0x1p20}};
    lines.push_back({{"name", curve.name}, {"points", points}, {"fit", fit}});
  }
  for (std::size_t i = 1; i < fastest.size(); ++i) crossings.push_back({fastest[i - 1].to, fastest[i].from});
  return {{"lines", lines}, {"crossings", crossings}};
}

std::string rows_of(std::span<const BenchRun> runs, const std::string& name) {
  pages::Table table{
      "Microseconds and GB/s",
      {"backend", "size", "in place", "algorithm", "p50", "p99", "min", "max", "algbw", "busbw", "bound", "wrong"}};
  for (const BenchRun& run : runs)
    for (const ordered_json& row : run.json.at("results")) {
      if (table_name(row) != name) continue;
      const BenchResult r = bench_result_from_json(row);
      std::vector<std::string>& cells = table.rows.emplace_back(1, curve_name(runs, run, row));
      for (const std::string& text : {with_commas(r.bytes), std::string(r.in_place ? "yes" : ""), r.algorithm})
        cells.push_back(text);
      for (const double value :
           {r.time_us.median, r.time_us.p99, r.time_us.min, r.time_us.max, r.algbw_gbps, r.busbw_gbps, r.bound_us})
        cells.push_back(significant(value, 5));
      cells.push_back(r.wrong ? with_commas(*r.wrong) : "not checked");
    }
  return pages::details("All rows", table);
}

std::string tables_of(std::span<const BenchRun> runs) {
  std::string html;
  for (const auto& [name, curves] : bench_curves_of(runs)) {
    html += "<h2>" + escape(name) + "</h2>\n";
    for (const BenchRun& run : runs)
      for (const ordered_json& v : list_in(run.json, "verdicts"))
        if (table_name(v) == name)
          html += paragraph(curve_name(runs, run, v) + ": " + v.at("text").get<std::string>(), "verdict");
    const std::vector<Fastest> fastest = fastest_of(curves);
    std::vector<std::string> texts;
    for (const Fastest& f : fastest)
      texts.push_back(
          f.from == f.to ? fmt::format("{} at {}", f.name, base::format_size(f.from))
                         : fmt::format("{} from {} to {}", f.name, base::format_size(f.from), base::format_size(f.to)));
    if (curves.size() > 1 && !texts.empty())
      html += paragraph(fmt::format("The shortest times: {}.", fmt::join(texts, ", ")), "times");
    const bool sizes = std::ranges::any_of(curves, [](const Curve& c) {
      return std::ranges::any_of(c.points, [](const auto& r) { return r.bytes > 0; });
    });
    if (sizes) html += pages::chart("curves", curves_json(curves, fastest));
    html += rows_of(runs, name);
  }
  return html;
}

std::string pattern_of(const std::string& run, const ordered_json& pattern) {
  std::string html = fmt::format(
      "<h2>{}</h2>\n", escape(fmt::format("{}Pattern {}: {} of {}, {}", run, pattern.at("pattern").get<std::string>(),
                                          pattern.at("op").get<std::string>(),
                                          base::format_size(pattern.at("bytes").get<std::uint64_t>()),
                                          pattern.at("backend").get<std::string>())));
  for (const ordered_json& part : pattern.at("slow"))
    html += paragraph(
        fmt::format("Slow: {}, {:.4g} GB/s where the median is {:.4g}.", name_of_units(pattern, part.at("units")),
                    part.at("gbps").get<double>(), part.at("median_gbps").get<double>()),
        "verdict differs");
  if (pattern.at("slow").empty()) html += paragraph("No part is slower than the others beyond the outlier rule.");
  pages::Table table{"Bus bandwidth, GB/s", {"between", "GB/s"}};
  ordered_json bars = ordered_json::array(), names = ordered_json::array();
  for (const ordered_json& rate : pattern.at("rates")) {
    const std::string name = name_of_units(pattern, rate.at("units"));
    const double gbps = rate.at("gbps");
    table.rows.push_back({name, significant(gbps, 4)});
    bars.push_back({name, {gbps}, nullptr, gbps});
  }
  for (const ordered_json& unit : pattern.at("units")) names.push_back(unit.at("name").get<std::string>());
  if (pattern.contains("matrix_gbps"))
    html += pages::chart("heat", {{"label", "Bus bandwidth from row to column; the table below has the numbers"},
                                  {"names", names},
                                  {"rows", pattern["matrix_gbps"].get<std::vector<std::vector<ordered_json>>>()},
                                  {"slow", pattern.at("slow")}});
  else
    html += pages::chart("bars", {{"label", "Bus bandwidth; the table below has the numbers"},
                                  {"unit", "GB/s"},
                                  {"keys", {"bus bandwidth"}},
                                  {"rows", bars}});
  return html + pages::details("All rates", table);
}

/// "18:40:00" of "2026-11-27T18:40:00.123Z".
std::string clock_of(const std::string& time) { return time.substr(std::min<std::size_t>(time.size(), 11), 8); }

/// Times over a long run: a picture for each point of each backend.
std::string long_run_of(const std::string& run, const std::string& backend, const ordered_json& intervals) {
  std::string html;
  ordered_json times = ordered_json::array();
  pages::Table stalls{"Calls that took much longer than their median",
                      {"time", "operation", "bytes", "microseconds", "median"}};
  std::vector<std::pair<std::string, std::map<std::string, std::vector<double>>>> points;
  for (const ordered_json& interval : intervals) {
    times.push_back(clock_of(interval.at("time")));
    const ordered_json& all = interval.at("points");
    points.resize(std::max(points.size(), all.size()));
    for (std::size_t i = 0; i < all.size(); ++i) {
      points[i].first =
          fmt::format("{} of {}", table_name(all[i]), base::format_size(all[i].at("bytes").get<std::uint64_t>()));
      for (const char* key : {"median_us", "p99_us", "max_us"}) points[i].second[key].push_back(all[i].at(key));
    }
    for (const ordered_json& s : interval.at("stalls"))
      stalls.rows.push_back({s.at("time"), s.at("op"), with_commas(s.at("bytes").get<std::uint64_t>()),
                             significant(s.at("us"), 5), significant(s.at("median_us"), 5)});
  }
  for (const auto& [name, values] : points) {
    ordered_json lines = ordered_json::array();
    for (const auto& [key, title] : {std::pair("max_us", "longest"), {"p99_us", "p99"}, {"median_us", "median"}})
      lines.push_back({{"name", title}, {"values", values.at(key)}});
    html += fmt::format("<h2>{}</h2>\n", escape(fmt::format("{}{}: {} over time", run, backend, name))) +
            paragraph("Microseconds of a call in each interval.") +
            pages::chart("lines", {{"label", "Microseconds over time"}, {"marks", times}, {"lines", lines}});
  }
  return html + (stalls.rows.empty() ? "" : pages::to_html(stalls));
}

void flatten(const std::string& where, const ordered_json& value, std::map<std::string, std::string>& rows) {
  const bool nested = value.is_object() || (value.is_array() && !value.empty() && value[0].is_object());
  if (!nested) rows[where] = value.is_string() ? value.get<std::string>() : value.is_null() ? "" : json_text(value);
  if (nested)
    for (const auto& [key, part] : value.items()) flatten(where.empty() ? key : where + " " + key, part, rows);
}

std::string environments_of(std::span<const BenchRun> runs) {
  std::string html = "<h2>Environment</h2>\n";
  pages::Table table{"Where the runs were measured", {""}};
  std::vector<std::map<std::string, std::string>> columns;
  std::set<std::string> names;
  const auto environment = [](const BenchRun& run) { return run.json.value("environment", ordered_json::object()); };
  for (const BenchRun& run : runs) {
    table.head.push_back(runs.size() > 1 ? run.name : "value");
    flatten("", environment(run), columns.emplace_back());
    columns.back()["ranks of the run"] = std::to_string(run.json.at("ranks").get<int>());
    columns.back()["caches"] = run.json.at("cold").get<bool>() ? "cold" : "warm";
    const ordered_json memcpy = run.json.value("memcpy_gbps", ordered_json::object());
    for (const auto& [name, value] : memcpy.items())
      columns.back()["memcpy GB/s " + name] = significant(value.get<double>(), 4);
    for (const auto& [name, value] : columns.back()) names.insert(name);
    if (&run == &runs.front()) continue;
    for (const std::string& line : environment_differences(environment(runs.front()), environment(run)))
      html += paragraph(fmt::format("{} differs from {}: {}", run.name, runs.front().name, line));
  }
  for (const std::string& name : names) {
    std::vector<std::string>& row = table.rows.emplace_back(1, name);
    for (auto& column : columns) row.push_back(column[name]);
  }
  return html + pages::details("All values", table);
}

}  // namespace

std::string bench_page(std::span<const BenchRun> runs) {
  std::vector<std::string> names;
  std::string pictures = tables_of(runs);
  for (const BenchRun& run : runs) {
    names.push_back(fmt::format("{}{} {}", runs.size() > 1 ? run.name + ", " : "", run.json.at("ranks").get<int>(),
                                run.json["ranks"] == 1 ? "rank" : "ranks"));
    const std::string prefix = runs.size() > 1 ? run.name + ": " : "";
    for (const ordered_json& pattern : list_in(run.json, "patterns")) pictures += pattern_of(prefix, pattern);
    if (run.json.contains("long_run"))
      for (const auto& [backend, intervals] : run.json["long_run"].at("intervals").items())
        pictures += long_run_of(prefix, backend, intervals);
  }
  const std::string title = fmt::format("bench: {}", fmt::join(names, "; "));
  return pages::document(title, "<section>\n<h1>" + escape(title) + "</h1>\n" +
                                    paragraph("A time is the median over calls of the slowest rank's; GB = 1e9 bytes. "
                                              "Bands reach from the shortest call to the 99th percentile.") +
                                    pictures + environments_of(runs) + "</section>\n");
}

int bench_report(const BenchOptions& options) {
  check_outputs({{"--report", options.report}}, options.ops);
  std::vector<BenchRun> runs;
  for (const std::string& path : options.ops) {
    std::string name = std::filesystem::path(path).stem();
    if (std::ranges::find(runs, name, &BenchRun::name) != runs.end()) name = path;
    const BenchRun& run = runs.emplace_back(name, read_bench_file("--report", path, false).json);
    try {
      bench_page(std::vector{run, run});  // two, since their environments are compared
    } catch (const ordered_json::exception&) {
      refuse_bench_file("--report", path, "is not what `tessera bench --json` writes; give such files");
    }
  }
  write_file(options.report, bench_page(runs));
  return 0;
}

}  // namespace tessera::tools
