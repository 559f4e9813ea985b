// Small JSON files written by other programs: parsed whole, with errors that name the file and the field.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::nn::internal {

using base::InvalidUsage;
using Json = nlohmann::json;

/// Typed access to a JSON object; every error names the file and the field.
class Fields {
 public:
  Fields(const Json& json, std::string origin) : json_(json), origin_(std::move(origin)) {}

  [[noreturn]] void fail(const std::string& what) const { throw InvalidUsage(origin_ + ": " + what); }
  const std::string& origin() const { return origin_; }
  bool has(const char* field) const { return json_.contains(field) && !json_.at(field).is_null(); }
  const Json& at(const char* field) const { return json_.at(field); }

  std::int64_t integer(const char* field) const {
    if (!has(field)) fail(std::string("the field '") + field + "' is missing");
    const Json& value = json_.at(field);
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > 1ULL << 62U))
      fail(std::string("'") + field + "' is " + shown(value) + ", needs a whole number");
    return value.get<std::int64_t>();
  }
  std::int64_t integer(const char* field, std::int64_t otherwise) const {
    return has(field) ? integer(field) : otherwise;
  }

  double number(const char* field, double otherwise) const {
    if (!has(field)) return otherwise;
    const Json& value = json_.at(field);
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      fail(std::string("'") + field + "' is " + shown(value) + ", needs a number");
    return value.get<double>();
  }
  bool flag(const char* field, bool otherwise) const {
    if (!has(field)) return otherwise;
    const Json& value = json_.at(field);
    if (!value.is_boolean()) fail(std::string("'") + field + "' is " + shown(value) + ", needs true or false");
    return value.get<bool>();
  }
  std::string text(const char* field, const std::string& otherwise) const {
    if (!has(field)) return otherwise;
    const Json& value = json_.at(field);
    if (!value.is_string()) fail(std::string("'") + field + "' is " + shown(value) + ", needs a string");
    return value.get<std::string>();
  }
  /// Throws if a field that affects the mathematics has an unsupported value.
  void only(const char* field, bool supported) const {
    if (flag(field, supported) != supported)
      fail(std::string("'") + field + ": " + shown(json_.at(field)) + "' is not supported");
  }

 private:
  static std::string shown(const Json& value) {
    return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80);
  }
  const Json& json_;
  const std::string origin_;
};

/// Throws InvalidUsage if the text is no object, is nested too deeply or is too long for a configuration.
inline Json parse_object(std::string_view text, const std::string& origin) {
  if (text.size() > (1U << 20U))
    throw InvalidUsage(origin + ": " + std::to_string(text.size()) +
                       " bytes exceed the 1 MiB limit of a configuration");
  int deepest = 0;
  const auto shallow = [&deepest](int depth, Json::parse_event_t, Json&) {
    return (deepest = std::max(deepest, depth)) < 64;
  };
  Json json = Json::parse(text, shallow, false);
  if (!json.is_object() || deepest >= 64) throw InvalidUsage(origin + ": not a JSON object");
  return json;
}

inline std::string read_text(const std::string& path) {
  base::FileText read = base::read_regular(path);
  if (!read.problem.empty()) throw InvalidUsage(path + ": can't be read: " + read.problem);
  return std::move(read.text);
}

}  // namespace tessera::nn::internal
