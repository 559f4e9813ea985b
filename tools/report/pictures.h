// The report's pictures: curves as SVG, bars as boxes that follow the page's width. Screen readers skip all pictures
// and read the table below each.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools::report {

struct Curve {
  std::string name;
  std::vector<double> values;  ///< evenly spaced; NaN leaves a gap
};
/// Draws values from left to right. If curves coincide, later ones are drawn thinner, so that all are visible. `ends`:
/// what stands below the first and the last value, or below the only one.
std::string curves(const std::vector<Curve>& all, const std::string& label, const std::vector<std::string>& ends);

struct Segment {
  double value = 0;
  int color = 0;     ///< of the palette
  std::string name;  ///< shown on hover
};
struct Bar {
  std::string name;
  std::vector<Segment> segments;  ///< drawn end to end
  double mark = -1;               ///< a line across the bar at this value, unless negative
  std::string text;               ///< at the right end
};
/// Horizontal bars with one scale.
std::string bars(const std::vector<Bar>& all, const std::string& label);

struct Key {
  std::string name;
  int color = 0;  ///< of the palette; -1: the mark
};
std::string legend(const std::vector<Key>& keys);

/// Colors of the palette.
inline constexpr int kColors = 8;

}  // namespace tessera::tools::report
