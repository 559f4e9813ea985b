#include "tools/cli/json_object.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/json/json_reader.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::json;

std::string describe(NumberRange range) {
  const bool low = range.low > std::numeric_limits<double>::lowest();
  const bool high = range.high < std::numeric_limits<double>::max();
  std::string text = "a number";
  if (low) text += fmt::format("{} {}", range.open ? " above" : " of at least", range.low);
  if (high) text += fmt::format("{} at most {}", low ? " and" : " of", range.high);
  return text;
}

bool contains(NumberRange range, double value) {
  return std::isfinite(value) && value <= range.high && (range.open ? value > range.low : value >= range.low);
}

}  // namespace

JsonObject::JsonObject(const Json& value, std::string file, std::string path)
    : value_(value), file_(std::move(file)), path_(std::move(path)) {
  if (!value_.is_object())
    throw base::InvalidUsage(fmt::format("'{}': {} is {}; expected an object", file_,
                                         path_.empty() ? "the document" : path_, base::brief(value_)));
}

std::string JsonObject::path_of(const std::string& key) const {
  return (path_.empty() ? "" : path_ + ".") + json_text(key).substr(1, json_text(key).size() - 2);
}

void JsonObject::fail(const std::string& key, const std::string& problem) const {
  throw base::InvalidUsage(fmt::format("'{}': {} {}", file_, path_of(key), problem));
}

bool JsonObject::has(const std::string& key) {
  if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
  return value_.contains(key);
}

const Json& JsonObject::at(const std::string& key, const std::string& expected) {
  if (!has(key)) fail(key, "is missing; expected " + expected);
  return value_[key];
}

double JsonObject::number(const std::string& key, NumberRange range) {
  const Json& value = at(key, describe(range));
  if (!value.is_number() || !contains(range, value.get<double>()))
    fail(key, "is " + base::brief(value) + "; expected " + describe(range));
  return value.get<double>();
}

int JsonObject::integer(const std::string& key, int low) {
  constexpr int kMax = 1 << 20;
  const std::string expected = fmt::format("a whole number from {} to {}", low, kMax);
  const Json& value = at(key, expected);
  if (!value.is_number_integer() || value.get<double>() < low || value.get<double>() > kMax)
    fail(key, "is " + base::brief(value) + "; expected " + expected);
  return value.get<int>();
}

std::string JsonObject::text(const std::string& key) {
  const Json& value = at(key, "text");
  if (!value.is_string() || value.get_ref<const std::string&>().empty())
    fail(key, "is " + base::brief(value) + "; expected text");
  return value;
}

std::string JsonObject::text_or(const std::string& key, const std::string& fallback) {
  if (has(key) && value_[key] == "") return "";
  return has(key) ? text(key) : fallback;
}

std::size_t JsonObject::choice(const std::string& key, const std::vector<std::string>& choices) {
  const std::string expected = fmt::format("\"{}\"", fmt::join(choices, "\" or \""));
  const Json& value = at(key, expected);
  for (std::size_t i = 0; i < choices.size(); ++i)
    if (value == choices[i]) return i;
  fail(key, "is " + base::brief(value) + "; expected " + expected);
}

std::vector<JsonObject> JsonObject::objects(const std::string& key) {
  const Json& value = at(key, "an array of objects");
  if (!value.is_array()) fail(key, "is " + base::brief(value) + "; expected an array of objects");
  std::vector<JsonObject> all;
  for (std::size_t i = 0; i < value.size(); ++i)
    all.emplace_back(value[i], file_, fmt::format("{}[{}]", path_of(key), i));
  return all;
}

std::vector<std::pair<double, double>> JsonObject::points(const std::string& key) {
  const std::string expected = "an array of [x, y], x increasing and neither negative";
  const Json& value = at(key, expected);
  if (!value.is_array() || value.empty()) fail(key, "is " + base::brief(value) + "; expected " + expected);
  std::vector<std::pair<double, double>> all;
  for (const Json& point : value) {
    const std::string name = fmt::format("{}[{}]", key, all.size());
    if (!point.is_array() || point.size() != 2 || !point[0].is_number() || !point[1].is_number())
      fail(name, "is " + base::brief(point) + "; expected [x, y]");
    const std::pair<double, double> next(point[0].get<double>(), point[1].get<double>());
    if (!contains(kNotNegative, next.first) || !contains(kNotNegative, next.second))
      fail(name, fmt::format("is [{}, {}]; neither may be negative", next.first, next.second));
    if (!all.empty() && next.first <= all.back().first)
      fail(name, fmt::format("is at {}, not above the one before at {}", next.first, all.back().first));
    all.push_back(next);
  }
  return all;
}

std::vector<std::string> JsonObject::keys() const {
  std::vector<std::string> all;
  for (const auto& [key, value] : value_.items()) all.push_back(key);
  return all;
}

void JsonObject::refuse_others() const {
  for (const std::string& key : keys())
    if (std::find(known_.begin(), known_.end(), key) == known_.end())
      fail(key, fmt::format("is not a known key; known here: {}", fmt::join(known_, " ")));
}

}  // namespace tessera::tools
