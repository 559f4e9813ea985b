#include "tools/bench/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::tools {
namespace {

constexpr int kEnoughPoints = 6;
constexpr double kEnoughSpan = 1000;  // a smaller span determines one of the coefficients badly

std::optional<AlphaBetaFit> fit_of(std::span<const BenchResult> results, const BenchResult& like) {
  std::vector<FitPoint> points;
  for (const BenchResult& r : results)
    if (r.backend == like.backend && r.op == like.op && !r.in_place)
      points.push_back({static_cast<double>(r.bytes), r.time_us.median});
  return fit_alpha_beta(points);
}

/// The first result of each backend and operation.
std::vector<const BenchResult*> curves_of(std::span<const BenchResult> results) {
  std::vector<const BenchResult*> firsts;
  for (const BenchResult& r : results) {
    const auto same = [&](const BenchResult* first) { return first->backend == r.backend && first->op == r.op; };
    if (std::none_of(firsts.begin(), firsts.end(), same)) firsts.push_back(&r);
  }
  return firsts;
}

}  // namespace

std::vector<BackendFit> fits_of(std::span<const BenchResult> results) {
  std::vector<BackendFit> fits;
  for (const BenchResult* first : curves_of(results))
    if (const auto fit = fit_of(results, *first)) fits.push_back({first->backend, first->op, *fit});
  return fits;
}

nlohmann::ordered_json to_json(const BackendFit& f) {
  return {{"backend", f.backend},
          {"op", f.op},
          {"alpha_us", f.fit.alpha_us},
          {"beta_us_per_mib", f.fit.beta_us_per_byte * 0x1p20},
          {"median_error", f.fit.median_error},
          {"worst_error", f.fit.worst_error},
          {"points", f.fit.points}};
}

std::string fit_line(std::span<const BenchResult> results) {
  if (results.empty()) return "";
  const auto fit = fit_of(results, results.front());
  if (!fit) return fmt::format("none: needs {} sizes or more", kFewestFitPoints);
  std::string text = fmt::format("{:.3g} us", fit->alpha_us);
  if (fit->beta_us_per_byte > 0) text += fmt::format(" + size / {:.3g} GB/s", 1e-3 / fit->beta_us_per_byte);
  text +=
      fmt::format(", off by {:.0f}% in the median, {:.0f}% at worst", 100 * fit->median_error, 100 * fit->worst_error);
  if (fit->points < kEnoughPoints || fit->span < kEnoughSpan)
    text += fmt::format("; uncertain: {} sizes, the largest {:.0f} times the smallest", fit->points, fit->span);
  return text;
}

std::string side_by_side(std::span<const BenchResult> results) {
  std::vector<std::string> backends;
  struct Row {
    std::string op;
    std::uint64_t bytes = 0;
    std::vector<double> us;  ///< by backend; NaN: not measured
  };
  std::vector<Row> lines;
  for (const BenchResult& r : results)
    if (std::find(backends.begin(), backends.end(), r.backend) == backends.end()) backends.push_back(r.backend);
  for (const BenchResult& r : results) {
    if (r.in_place) continue;
    const auto same = [&](const Row& line) { return line.op == r.op && line.bytes == r.bytes; };
    auto line = std::find_if(lines.begin(), lines.end(), same);
    if (line == lines.end())
      line = lines.insert(lines.end(), Row{r.op, r.bytes, std::vector<double>(backends.size(), NAN)});
    line->us[static_cast<std::size_t>(std::find(backends.begin(), backends.end(), r.backend) - backends.begin())] =
        r.time_us.median;
  }
  std::string text = "#\n# Side by side: median us out of place, * is the best\n#\n";
  text += fmt::format("# {:<14}  {:>12}", "op", "size");
  for (const std::string& backend : backends) text += fmt::format("  {:>12}", backend);
  text += "\n";
  for (const Row& line : lines) {
    double best = INFINITY;
    for (const double us : line.us) best = std::fmin(best, us);
    text += fmt::format("# {:<14}  {:>12}", line.op, line.bytes);
    for (const double us : line.us)
      text += fmt::format("  {:>10}{:>2}", std::isnan(us) ? "-" : fmt::format("{:.2f}", us), us == best ? "*" : "");
    text += "\n";
  }
  return text;
}

}  // namespace tessera::tools
