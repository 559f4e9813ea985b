// bench --plot: the results as one self-contained SVG file.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tools/bench/output.h"
#include "tools/pages/page.h"

namespace tessera::tools {
namespace {

using pages::escape;
using pages::significant;

constexpr std::size_t kColors = 8;  // of the palette
constexpr double kPanelWidth = 400;
constexpr double kPanelHeight = 220;
constexpr double kLeft = 70;  // left margin of a panel, for the labels of its y axis
constexpr double kTop = 100;  // top margin of the first row, for caption and legend
constexpr double kRowHeight = kPanelHeight + 80;
constexpr double kWidth = 2 * (kLeft + kPanelWidth) + 20;

struct Point {
  double x = 0;
  double y = 0;
};

struct Panel {
  std::string op;
  std::string measure;  ///< "latency", "busbw"
  std::string title;
  std::vector<std::vector<Point>> curves;  ///< by backend
};

/// Whole powers of `base` around all values, and the number of steps.
struct Axis {
  double base = 10;
  int low = 0;
  int high = 1;
  double part(double value) const { return (std::log(value) / std::log(base) - low) / (high - low); }
};

Axis axis_of(const Panel& panel, double Point::*side, double base) {
  double low = INFINITY;
  double high = 0;
  for (const std::vector<Point>& curve : panel.curves)
    for (const Point& point : curve) {
      low = std::min(low, point.*side);
      high = std::max(high, point.*side);
    }
  Axis axis{base, static_cast<int>(std::floor(std::log(low) / std::log(base) + 1e-9)),
            static_cast<int>(std::ceil(std::log(high) / std::log(base) - 1e-9))};
  if (axis.high <= axis.low) axis.high = axis.low + 1;
  return axis;
}

/// Two panels for each operation, in the order of the results.
std::vector<Panel> panels_of(std::span<const BenchResult> results, const std::vector<std::string>& backends) {
  std::vector<Panel> panels;
  for (const BenchResult& r : results) {
    if (r.in_place || r.bytes == 0) continue;
    const auto same = [&](const Panel& panel) { return panel.op == r.op; };
    auto panel = std::find_if(panels.begin(), panels.end(), same);
    if (panel == panels.end()) {
      const std::vector<std::vector<Point>> curves(backends.size());
      panels.push_back({r.op, "latency", r.op + ": time (us)", curves});
      panels.push_back({r.op, "busbw", r.op + ": busbw (GB/s)", curves});
      panel = panels.end() - 2;
    }
    const auto index =
        static_cast<std::size_t>(std::find(backends.begin(), backends.end(), r.backend) - backends.begin());
    const auto bytes = static_cast<double>(r.bytes);
    if (r.time_us.median > 0) panel[0].curves[index].push_back({bytes, r.time_us.median});
    if (r.busbw_gbps > 0) panel[1].curves[index].push_back({bytes, r.busbw_gbps});
  }
  return panels;
}

/// 2^power bytes.
std::string size_label(int power) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  return fmt::format("{} {}", 1 << (power % 10), kUnits.at(static_cast<std::size_t>(power / 10)));
}

std::string color(std::size_t index) { return "var(--c" + std::to_string(index % kColors) + ")"; }

/// Backends beyond the palette's colors are distinguished by dashes.
std::string dashes(std::size_t index) {
  const std::size_t round = index / kColors;
  return round == 0 ? "" : fmt::format(" stroke-dasharray=\"{} 3\"", 3 + 3 * round);
}

std::string grid(const Axis& x, const Axis& y) {
  std::string svg;
  const int x_step = (x.high - x.low + 6) / 7;
  for (int power = x.low; power <= x.high; power += x_step) {
    const std::string at = significant(kPanelWidth * (power - x.low) / (x.high - x.low), 6);
    svg += fmt::format(
        "<line class=\"grid\" x1=\"{0}\" x2=\"{0}\" y1=\"0\" y2=\"{1}\"/><text class=\"x\" x=\"{0}\" "
        "y=\"{2}\">{3}</text>",
        at, kPanelHeight, kPanelHeight + 16, size_label(power));
  }
  const int y_step = (y.high - y.low + 6) / 7;
  for (int power = y.low; power <= y.high; power += y_step) {
    const double at = kPanelHeight * (y.high - power) / (y.high - y.low);
    svg += fmt::format(
        "<line class=\"grid\" x1=\"0\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/><text class=\"y\" x=\"-8\" "
        "y=\"{}\">{}</text>",
        kPanelWidth, significant(at, 6), significant(at, 6), significant(at + 4, 6),
        significant(std::pow(10.0, power), 6));
  }
  return svg;
}

std::string draw(const Panel& panel, const std::vector<std::string>& backends, double left, double top) {
  const Axis x = axis_of(panel, &Point::x, 2);
  const Axis y = axis_of(panel, &Point::y, 10);
  std::string svg = fmt::format("<g transform=\"translate({} {})\"><text class=\"title\" x=\"0\" y=\"-10\">{}</text>{}",
                                left, top, escape(panel.title), grid(x, y));
  for (std::size_t i = 0; i < panel.curves.size(); ++i) {
    if (panel.curves[i].empty()) continue;
    const std::string backend = escape(backends[i]);
    std::string path;
    std::string dots;
    for (const Point& point : panel.curves[i]) {
      const std::string at_x = significant(kPanelWidth * x.part(point.x), 6);
      const std::string at_y = significant(kPanelHeight * (1 - y.part(point.y)), 6);
      path += (path.empty() ? "M" : "L") + at_x + " " + at_y;
      dots += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"2.2\"><title>{} {}: {}</title></circle>", at_x, at_y,
                          backend, human_bytes(point.x), significant(point.y, 4));
    }
    svg += fmt::format(
        "<path class=\"curve\" data-backend=\"{}\" data-op=\"{}\" data-measure=\"{}\" d=\"{}\" "
        "stroke=\"{}\"{}/><g fill=\"{}\">{}</g>",
        backend, escape(panel.op), panel.measure, path, color(i), dashes(i), color(i), dots);
  }
  return svg + "</g>\n";
}

std::string legend(const std::vector<std::string>& backends) {
  std::string svg;
  double x = kLeft;
  for (std::size_t i = 0; i < backends.size(); ++i) {
    svg += fmt::format(
        "<g class=\"legend\"><line x1=\"{0}\" x2=\"{1}\" y1=\"66\" y2=\"66\" stroke=\"{2}\" "
        "stroke-width=\"3\"{3}/><text x=\"{4}\" y=\"70\">{5}</text></g>",
        x, x + 26, color(i), dashes(i), x + 33, escape(backends[i]));
    x += 60 + 9 * static_cast<double>(backends[i].size());
  }
  return svg;
}

}  // namespace

std::string bench_plot(std::span<const BenchResult> results, const std::string& caption, const std::string& machine) {
  const std::vector<std::string> backends = backends_in(results);
  std::vector<Panel> panels = panels_of(results, backends);
  const double height = kTop + kRowHeight * static_cast<double>(panels.size()) / 2;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" role=\"img\" "
      "aria-label=\"{2}\">\n<style>{3}"
      "text {{ font: 13px system-ui, sans-serif; fill: var(--ink); }} .title {{ font-weight: 600; }}\n"
      ".x {{ text-anchor: middle; fill: var(--soft); font-size: 11px; }}"
      " .y {{ text-anchor: end; fill: var(--soft); font-size: 11px; }}\n"
      ".grid {{ stroke: var(--line); }} .curve {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}\n"
      "</style>\n<rect width=\"100%\" height=\"100%\" fill=\"var(--paper)\"/>\n"
      "<text x=\"{4}\" y=\"22\">{2}</text><text x=\"{4}\" y=\"42\">{6}</text>\n{5}\n",
      kWidth, height, escape(caption), pages::kPalette, kLeft, legend(backends), escape(machine));
  for (std::size_t i = 0; i < panels.size(); ++i) {
    const bool drawable = std::any_of(panels[i].curves.begin(), panels[i].curves.end(),
                                      [](const std::vector<Point>& curve) { return !curve.empty(); });
    const double left = kLeft + (i % 2 == 0 ? 0 : kLeft + kPanelWidth);
    const std::size_t row = i / 2;
    if (drawable) svg += draw(panels[i], backends, left, kTop + 25 + kRowHeight * static_cast<double>(row));
  }
  return svg + "</svg>\n";
}

}  // namespace tessera::tools
