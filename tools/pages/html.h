// Text, formatted numbers, styles and scripts for HTML.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools::pages {

/// Text that is valid in an element or a quoted attribute, whatever it contains.
std::string escape(std::string_view text);

/// The text with `by` in place of each `what`.
std::string replaced(std::string_view text, char what, std::string_view by);

/// The shortest form with `digits` significant digits: "1.23", "0.5".
std::string significant(double value, int digits);

/// The shortest form that reads back as the same bits.
std::string exact(double value);

/// A table whose first column names the rows. Cells and titles are text: the table escapes them.
struct Table {
  std::string caption;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows = {};
};
std::string to_html(const Table& table);

/// What permits this script or style sheet, and no other, in a Content-Security-Policy.
std::string hash_source(const std::string& text);

// The files of live/, D3 and the presets of clusters, as constants that the build writes.
extern const std::string_view kD3;       ///< of node-d3: version 5, minified
extern const std::string_view kPalette;  ///< colors of the light and dark schemes: --c0 to --c7 distinguish items
extern const std::string_view kPageStyle;
extern const std::string_view kClusters;    ///< plan/clusters.json
extern const std::string_view kPageScript;  ///< the files of live/, which share their names

}  // namespace tessera::tools::pages
