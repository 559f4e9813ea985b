// Small JSON files written by other programs: parsed whole, with errors that name the file and the field.
#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"

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
  bool contains(const char* field) const { return json_.contains(field); }  // null counts
  const Json& at(const char* field) const { return json_.at(field); }

  std::int64_t integer(const char* field) const {
    if (!has(field)) fail(std::string("the field '") + field + "' is missing");
    const Json& value = json_.at(field);
    constexpr std::int64_t kMost = std::int64_t{1} << 40;  // arithmetic with a few of them does not overflow
    const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= kMost
                                                 : value.is_number_integer() && value.get<std::int64_t>() >= -kMost;
    if (!fits)
      fail(std::string("'") + field + "' is " + shown(value) + ", needs a whole number between -2^40 and 2^40");
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
  const Json& object(const char* field) const {
    if (!at(field).is_object()) fail(std::string("'") + field + "' is " + shown(at(field)) + ", needs an object");
    return at(field);
  }
  std::string text(const char* field, const std::string& otherwise) const {
    if (!has(field)) return otherwise;
    const Json& value = json_.at(field);
    if (!value.is_string()) fail(std::string("'") + field + "' is " + shown(value) + ", needs a string");
    return value.get<std::string>();
  }
  /// Throws if a field that affects the mathematics has an unsupported value.
  void only(const char* field, bool supported) const {
    if (flag(field, supported) != supported) fail_unsupported(field);
  }
  /// Throws if a field is set, that is, neither absent nor null, false or empty.
  void only_unset(std::string_view field) const {
    const auto found = json_.find(field);
    if (found == json_.end() || found->is_null() || *found == false || *found == "") return;
    if (!found->is_structured() || !found->empty()) fail_unsupported(field);
  }
  /// Throws if a field other than `known` is set: it may affect the mathematics.
  void only_known(std::span<const std::string_view> known) const {
    for (const auto& [field, value] : json_.items())
      if (std::find(known.begin(), known.end(), field) == known.end()) only_unset(field);
  }
  [[noreturn]] void fail_unsupported(std::string_view field) const {
    const std::string name = shown(field);
    fail("'" + name.substr(1, name.size() - 2) + ": " + shown(json_.at(field)) + "' is not supported");
  }

 private:
  static std::string shown(const Json& value) {
    return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80);
  }
  const Json& json_;
  const std::string origin_;
};

/// JSON has no NaN and Infinity, but Python writes and reads them. As strings they concern only who reads a number.
inline std::string with_quoted_numbers(std::string_view text) {
  std::string quoted;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size();) {
    std::size_t length = 1;
    if (in_string && text[i] == '\\') {
      length = 2;
    } else if (text[i] == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      for (const std::string_view number : {"NaN", "Infinity", "-Infinity"})
        if (text.substr(i).starts_with(number)) length = number.size();
    }
    const std::string_view part = text.substr(i, length);
    quoted += !in_string && length > 1 ? '"' + std::string(part) + '"' : std::string(part);
    i += length;
  }
  return quoted;
}

inline constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{1} << 20;

/// Throws InvalidUsage if the text is no object, is nested too deeply or is longer than `limit`.
inline Json parse_object(std::string_view text, const std::string& origin, std::uint64_t limit = kMaxConfigBytes) {
  if (text.size() > limit)
    throw InvalidUsage(origin + ": " + std::to_string(text.size()) + " bytes are too many for such a file; at most " +
                       std::to_string(limit) + " are read");
  Json json = base::parse_json<Json>(with_quoted_numbers(text), origin + ":");
  if (!json.is_object()) throw InvalidUsage(origin + ": not a JSON object");
  return json;
}

/// Throws InvalidUsage "PATH: can't be read: REASON", also for a file of more than `limit` bytes.
inline std::string read_text(const std::string& path, std::uint64_t limit = kMaxConfigBytes) {
  base::FileText read = base::read_regular(path, limit);
  if (!read.problem.empty()) throw InvalidUsage(path + ": can't be read: " + read.problem);
  return std::move(read.text);
}

}  // namespace tessera::nn::internal
