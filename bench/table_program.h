// A program that measures a table of figures and writes it as text, and with --json as a file.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace bench {

/// The figures as text, and as an object a row.
struct Table {
  std::string text;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool written = true;  ///< false in ranks whose figures another rank writes
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// main() of the program `name`, which writes what `measure` returns. 0, or 2 after an error, which it prints.
inline int table_program(int count, char** arguments, const std::string& name, const std::string& purpose,
                         const std::function<Table()>& measure) {
  CLI::App app(purpose);
  std::string json;
  app.add_option("--json", json, "also writes the table here")->type_name("FILE");
  CLI11_PARSE(app, count, arguments);
  try {
    const Table table = measure();
    if (!table.written) return 0;
    fmt::print("{}", table.text);
    if (json.empty()) return 0;
    std::ofstream file(json);
    file << table.rows.dump(1) << "\n";
    if (!file.flush()) throw tessera::base::InvalidUsage("--json " + json + ": can't be written");
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: {}\n", name, error.what());
    return 2;
  }
}

}  // namespace bench
