#include "tessera/comm/algorithms.h"

#include <algorithm>
#include <cctype>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kVariable = "TESSERA_ALGO";

/// Splits at `separator`; calls `f` with each part.
template <class F>
void each_part(std::string_view text, char separator, F&& call) {
  while (true) {
    const std::size_t end = text.find(separator);
    call(text.substr(0, end));
    if (end == std::string_view::npos) return;
    text.remove_prefix(end + 1);
  }
}

/// The file's content in its one-line form.
std::string read_table(const std::string& path) {
  base::FileText read = base::read_regular(path);
  if (read.problem.empty() && read.text.empty()) read.problem = "it is empty";
  if (!read.problem.empty())
    throw InvalidUsage(std::string(kVariable) + ": can't read the file '" + path + "': " + read.problem);
  std::istringstream file(read.text);
  std::string all;
  for (std::string line; std::getline(file, line);) {
    line.resize(std::min(line.find('#'), line.size()));
    std::erase_if(line, [](unsigned char c) { return std::isspace(c) != 0; });
    if (!line.empty()) all += (all.empty() || all.ends_with(',') ? "" : ",") + line;
  }
  if (all.empty()) throw InvalidUsage(std::string(kVariable) + ": the file '" + path + "' names no algorithm");
  return all;
}

}  // namespace

AlgorithmTable::AlgorithmTable(std::string_view text, std::span<const std::string> known) {
  if (const std::string table = one_line(text); !table.empty())
    each_part(table, ',', [&](std::string_view part) { parse_operation(part, known); });
}

std::string AlgorithmTable::one_line(std::string_view text) {
  return text.starts_with('@') ? read_table(std::string(text.substr(1))) : std::string(text);
}

void AlgorithmTable::parse_operation(std::string_view text, std::span<const std::string> known) {
  const std::size_t equals = text.find('=');
  if (equals == std::string_view::npos)
    throw InvalidUsage(std::string(kVariable) + ": '" + std::string(text) +
                       "' is not OPERATION=ALGORITHM[:FROM-TO][;...]");
  const std::string operation(text.substr(0, equals));
  const OpKind kind = parse_op_kind(operation);
  each_part(text.substr(equals + 1), ';', [&](std::string_view part) {
    AlgorithmRange range;
    const std::size_t colon = part.find(':');
    range.name = std::string(part.substr(0, colon));
    if (std::ranges::find(known, operation + "=" + range.name) == known.end()) {
      std::string names;
      for (const std::string& name : known) names += " " + name;
      throw InvalidUsage(std::string(kVariable) + ": unknown algorithm '" + operation + "=" + range.name +
                         "'; known:" + names);
    }
    if (colon != std::string_view::npos) {
      const std::string_view sizes = part.substr(colon + 1);
      const std::size_t dash = sizes.find('-');
      if (dash == std::string_view::npos)
        throw InvalidUsage(std::string(kVariable) + ": range '" + std::string(sizes) +
                           "' is not FROM-TO, such as 64K-max");
      range.from = parse_size(sizes.substr(0, dash), kVariable);
      const std::string_view to = sizes.substr(dash + 1);
      if (to != "max") range.to = parse_size(to, kVariable);
      if (range.from >= range.to)
        throw InvalidUsage(std::string(kVariable) + ": range '" + std::string(sizes) + "' is empty");
    }
    ranges_[static_cast<std::size_t>(kind)].push_back(std::move(range));
  });
}

std::string_view AlgorithmTable::choose(OpKind kind, std::uint64_t bytes) const {
  for (const AlgorithmRange& range : ranges_[static_cast<std::size_t>(kind)])
    if (bytes >= range.from && bytes < range.to) return range.name;
  return {};
}

}  // namespace tessera::comm
