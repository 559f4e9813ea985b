#include "tools/report/pictures.h"

#include <algorithm>
#include <cmath>

#include "tools/report/html.h"

namespace tessera::tools::report {
namespace {

constexpr double kWidth = 1000;  // in the curve's own coordinates; the page scales them
constexpr double kHeight = 400;
constexpr std::size_t kMaxPoints = 1000;

std::string percent(double part) { return significant(std::clamp(part, 0.0, 1.0) * 100, 5) + "%"; }

struct Scale {
  double low = 0;
  double high = 1;
  std::vector<double> ticks = {0, 0.25, 0.5, 0.75, 1};
  int digits = 5;  ///< that tell the ticks apart; 17: all

  /// Where a value lies below the top, from 0 to 1. The difference of two finite numbers may be infinite.
  double depth(double value) const {
    const double span = high - low;
    return std::isfinite(span) ? (high - value) / span : (high / 2 - value / 2) / (high / 2 - low / 2);
  }
};

/// Round numbers that enclose the values, about four steps apart; of values that are too close for these, or too far
/// apart, the lowest and the highest.
Scale scale_of(const std::vector<Curve>& all) {
  double low = INFINITY;
  double high = -INFINITY;
  for (const Curve& curve : all)
    for (const double value : curve.values)
      if (std::isfinite(value)) {
        low = std::min(low, value);
        high = std::max(high, value);
      }
  if (low > high) return {};
  if (low == high) {
    const double around = std::max(1e-6, std::fabs(low) * 1e-3);
    (std::isfinite(low + around) ? high : low) += std::isfinite(low + around) ? around : -around;
  }
  const double raw = (high - low) / 4, larger = std::max(std::fabs(low), std::fabs(high));
  // Of closer values, not even the steps between them can be computed.
  if (!std::isfinite(raw) || raw < 1e-300 || raw < 1e-9 * larger) return {low, high, {low, high}, 17};
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = power;
  for (const double nice : {2.0, 5.0, 10.0})
    if (step < raw) step = power * nice;
  const double first = std::floor(low / step), last = std::ceil(high / step);
  Scale scale{first * step, last * step, {}, raw < 1e-4 * larger ? 12 : 5};
  for (double i = first; i <= last; ++i) scale.ticks.push_back(i * step);
  return scale;
}

std::string path_of(const std::vector<double>& values, const Scale& scale, std::size_t longest) {
  const std::size_t stride = values.size() / kMaxPoints + 1;
  std::string path;
  bool pen_down = false;
  for (std::size_t i = 0; i < values.size(); i += stride) {
    if (!std::isfinite(values[i])) {
      pen_down = false;
      continue;
    }
    const double x = longest > 1 ? kWidth * static_cast<double>(i) / static_cast<double>(longest - 1) : 0;
    const double y = kHeight * scale.depth(values[i]);
    path += (pen_down ? "L" : "M") + significant(x, 6) + " " + significant(y, 6);
    if (!pen_down) path += "h0";  // a single point is drawn as a dot
    pen_down = true;
  }
  return path;
}

std::string color(int index) { return "var(--c" + std::to_string(index % kColors) + ")"; }

}  // namespace

std::string curves(const std::vector<Curve>& all, const std::string& label, const std::vector<std::string>& ends) {
  const Scale scale = scale_of(all);
  std::size_t longest = 0;
  for (const Curve& curve : all) longest = std::max(longest, curve.values.size());

  std::string grid;
  std::string labels;
  for (const double value : scale.ticks) {
    const double part = scale.depth(value);
    grid += "<line x1=\"0\" x2=\"1000\" y1=\"" + significant(part * kHeight, 6) + "\" y2=\"" +
            significant(part * kHeight, 6) + "\"/>";
    labels += "<span style=\"top:" + percent(part) + "\">" +
              (scale.digits == 17 ? exact(value) : significant(value, scale.digits)) + "</span>";
  }
  std::string html = "<figure class=\"curves\" role=\"img\" aria-label=\"" + escape(label) + "\"><div class=\"y\">" +
                     labels + "</div><svg viewBox=\"0 0 1000 400\" preserveAspectRatio=\"none\"><g class=\"grid\">" +
                     grid + "</g>";
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t width = 2 + 4 * (all.size() - 1 - i);
    html += "<path d=\"" + path_of(all[i].values, scale, longest) + "\" stroke=\"" + color(static_cast<int>(i)) +
            "\" stroke-width=\"" + std::to_string(width) + "\"><title>" + escape(all[i].name) + "</title></path>";
  }
  html += "</svg><div class=\"x\">";
  for (const std::string& end : ends) html += "<span>" + escape(end) + "</span>";
  return html + "</div></figure>\n";
}

std::string bars(const std::vector<Bar>& all, const std::string& label) {
  double longest = 0;
  for (const Bar& bar : all) {
    double sum = 0;
    for (const Segment& segment : bar.segments) sum += segment.value;
    longest = std::max({longest, sum, bar.mark});
  }
  if (longest <= 0) longest = 1;
  std::string html = "<figure class=\"bars\" role=\"img\" aria-label=\"" + escape(label) + "\">\n";
  for (const Bar& bar : all) {
    html += "<div class=\"bar\"><span class=\"name\">" + escape(bar.name) + "</span><span class=\"track\">";
    for (const Segment& segment : bar.segments)
      if (segment.value > 0)
        html += "<i style=\"width:" + percent(segment.value / longest) + ";background:" + color(segment.color) +
                "\" title=\"" + escape(segment.name) + "\"></i>";
    if (bar.mark >= 0) html += "<b style=\"left:" + percent(bar.mark / longest) + "\"></b>";
    html += "</span><span class=\"text\">" + escape(bar.text) + "</span></div>\n";
  }
  return html + "</figure>\n";
}

std::string legend(const std::vector<Key>& keys) {
  std::string html = "<ul class=\"legend\" aria-hidden=\"true\">";
  for (const Key& key : keys) {
    const std::string sample = key.color < 0 ? "<b></b>" : "<i style=\"background:" + color(key.color) + "\"></i>";
    html += "<li>" + sample + escape(key.name) + "</li>";
  }
  return html + "</ul>\n";
}

}  // namespace tessera::tools::report
