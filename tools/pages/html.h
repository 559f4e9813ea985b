// Text and formatted numbers for HTML.
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

}  // namespace tessera::tools::pages
