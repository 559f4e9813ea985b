#include "tessera/base/json/json_reader.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::base {
namespace {

/// "line 3, column 7" of a byte.
std::string place_of(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, byte);
  const std::size_t line_end = before.rfind('\n');
  return "line " + std::to_string(1 + std::ranges::count(before, '\n')) + ", column " +
         std::to_string(before.size() - (line_end == std::string_view::npos ? 0 : line_end + 1) + 1);
}

}  // namespace

std::string brief(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  constexpr std::size_t kMost = 40;
  const std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

template <class Json>
Json parse_json(std::string_view text, const std::string& origin) {
  using Event = typename Json::parse_event_t;
  const auto fail = [&](const std::string& problem) { throw InvalidUsage(origin + " " + problem); };
  std::vector<std::set<std::string>> open;  // keys of the objects around the position
  std::size_t values = 0;
  const auto check = [&](int depth, Event event, const Json& value) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens && depth >= kMaxJsonDepth)
      fail("is nested more than " + std::to_string(kMaxJsonDepth) + " deep; no such file is");
    if (++values > kMaxJsonValues) fail("has more than " + std::to_string(kMaxJsonValues) + " values");
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key) {
      if (!open.back().insert(value.template get<std::string>()).second)
        fail("has the key " + brief(value) + " twice in an object");
      if (std::same_as<Json, nlohmann::ordered_json> && open.back().size() > kMaxOrderedKeys)
        fail("has an object of more than " + std::to_string(kMaxOrderedKeys) + " keys");
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const typename Json::parse_error& error) {
    fail("is not JSON: " + place_of(text, std::min(error.byte > 0 ? error.byte - 1 : 0, text.size())));
  } catch (const typename Json::out_of_range&) {
    fail("has a number that is too large");
  }
  return nullptr;  // not reached
}

template nlohmann::json parse_json<nlohmann::json>(std::string_view, const std::string&);
template nlohmann::ordered_json parse_json<nlohmann::ordered_json>(std::string_view, const std::string&);

JsonReader::JsonReader(const nlohmann::json& value, std::string origin, std::string path)
    : value_(&value), origin_(std::move(origin)), path_(std::move(path)) {}

void JsonReader::fail(const std::string& problem) const {
  throw InvalidUsage(origin_ + ": " + (path_.empty() ? "the document" : path_) + " " + problem);
}

void JsonReader::refuse(const std::string& expected) const { fail("is " + brief(*value_) + "; needs " + expected); }

void JsonReader::expect_object() const {
  if (!value_->is_object()) refuse("an object");
}

bool JsonReader::has(std::string_view key) const {
  expect_object();
  return value_->contains(key);
}

JsonReader JsonReader::at(std::string_view key) const {
  expect_object();
  const auto found = value_->find(key);
  if (found == value_->end()) fail("has no '" + printable(key) + "'");
  return {*found, origin_, (path_.empty() ? "" : path_ + ".") + printable(key)};
}

JsonReader JsonReader::at(std::size_t index) const {
  if (index >= size()) fail("has " + std::to_string(size()) + " elements; needs " + std::to_string(index + 1));
  return {(*value_)[index], origin_, path_ + "[" + std::to_string(index) + "]"};
}

std::size_t JsonReader::size() const {
  if (!value_->is_array()) refuse("an array");
  return value_->size();
}

std::vector<JsonReader> JsonReader::elements() const {
  std::vector<JsonReader> all;
  for (std::size_t i = 0; i < size(); ++i) all.push_back(at(i));
  return all;
}

std::vector<std::pair<std::string, JsonReader>> JsonReader::members() const {
  expect_object();
  std::vector<std::pair<std::string, JsonReader>> all;
  for (const auto& [key, value] : value_->items()) all.emplace_back(key, at(std::string_view(key)));
  return all;
}

std::int64_t JsonReader::integer(std::int64_t low, std::int64_t high) const {
  const bool large = value_->is_number_unsigned() && value_->get<std::uint64_t>() > std::uint64_t{1} << 62U;
  if (!value_->is_number_integer() || large || value_->get<std::int64_t>() < low || value_->get<std::int64_t>() > high)
    refuse("a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  return value_->get<std::int64_t>();
}

double JsonReader::number(double low, double high) const {
  const double value = value_->is_number() ? value_->get<double>() : NAN;
  if (!(value >= low && value <= high)) {
    using Limits = std::numeric_limits<double>;
    const bool positive = low == Limits::min(), bounded = high < Limits::max();
    const auto text = [](double bound) { return nlohmann::json(bound).dump(); };
    std::string range = "a number";
    if (positive) range += " above 0";
    if (!positive && low > Limits::lowest()) range += (bounded ? " from " : " of at least ") + text(low);
    if (bounded) range += (positive ? " and at most " : " to ") + text(high);
    refuse(range);
  }
  return value;
}

double JsonReader::number_or_nan() const { return value_->is_null() ? NAN : get<double>(); }

std::string JsonReader::text() const {
  if (!value_->is_string()) refuse("a text");
  return value_->get<std::string>();
}

bool JsonReader::flag() const {
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}

}  // namespace tessera::base
