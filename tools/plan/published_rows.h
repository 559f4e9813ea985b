// Measurements that others published: reads the rows of plan --validate.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// A training row, joined with its source's defaults, its model and its cluster.
struct PublishedRow {
  std::string id, source, cluster;  ///< names; cluster may be empty
  std::string reach;                ///< "yes", "partial", "no", or empty: not stated
  bool calibrates = false;
  nlohmann::json fields;   ///< of the row over the source's defaults; every known field has its type
  nlohmann::json model;    ///< an object, or null
  nlohmann::json machine;  ///< the cluster's object, or null

  std::string text(const char* key) const;  ///< "" if it is absent
  std::optional<double> number(const char* key) const;
};

/// Reads a JSON list, or one object per line. Throws InvalidUsage, one line with the file, the row and the field, for
/// an id that does not exist, a missing field or one of another type.
std::vector<PublishedRow> read_published_rows(const std::string& path);
/// As above; `file` names the text in errors.
std::vector<PublishedRow> parse_published_rows(const std::string& text, const std::string& file);

}  // namespace tessera::tools
