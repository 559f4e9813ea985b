// The pictures of the report: curves as SVG, bars as boxes that follow the page's width. All are decoration for a
// screen reader, which gets the table below each.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools::report {

struct Curve {
  std::string name;
  std::vector<double> values;  ///< one per step; NaN leaves a gap
};
/// Values over steps. Where curves lie on each other, the later ones are drawn thinner, so that all can be seen.
std::string curves(const std::vector<Curve>& all, const std::string& label);

struct Segment {
  double value = 0;
  int color = 0;     ///< of the palette
  std::string name;  ///< shown on hovering
};
struct Bar {
  std::string name;
  std::vector<Segment> segments;  ///< laid end to end
  double mark = -1;               ///< a line across the bar at this value, where it isn't negative
  std::string text;               ///< at its right
};
/// Horizontal bars with one scale.
std::string bars(const std::vector<Bar>& all, const std::string& label);

struct Key {
  std::string name;
  int color = 0;  ///< of the palette; -1: the mark
};
std::string legend(const std::vector<Key>& keys);

/// Colours of the palette.
inline constexpr int kColours = 8;

}  // namespace tessera::tools::report
