// Text for HTML, and numbers for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools::report {

/// Text as it may stand in an element or a quoted attribute, whatever it holds.
std::string escape(std::string_view text);

/// "10,844,160"
std::string with_commas(std::int64_t number);
/// The shortest of `digits` significant digits: "1.23", "0.5".
std::string significant(double value, int digits);

/// The shortest spelling that reads back to the same bits.
std::string exact(double value);

/// A table whose first column names the rows. Cells and titles are text: they are escaped here.
struct Table {
  std::string caption;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
std::string to_html(const Table& table);

}  // namespace tessera::tools::report
