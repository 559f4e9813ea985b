// Reads a JSON object of a user's file: every field is checked, and unknown keys are errors.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::tools {

/// Bounds of a number, both included; `open`: the lower one is excluded.
struct NumberRange {
  double low = std::numeric_limits<double>::lowest();
  double high = std::numeric_limits<double>::max();
  bool open = false;
};

inline constexpr NumberRange kPositive{0, std::numeric_limits<double>::max(), true};
inline constexpr NumberRange kNotNegative{0};
/// Above 0 and at most 1.
inline constexpr NumberRange kFraction{0, 1, true};

/// One object of the document, which outlives it. Errors are InvalidUsage: one line with the file, the key as a path
/// from the document's root, and what is expected.
class JsonObject {
 public:
  /// `path` is "" for the root.
  JsonObject(const nlohmann::json& value, std::string file, std::string path = "");

  bool has(const std::string& key);
  /// False also if the key is missing.
  bool is_array(const std::string& key) const { return value_.contains(key) && value_[key].is_array(); }
  double number(const std::string& key, NumberRange range);
  double number_or(const std::string& key, double fallback, NumberRange range) {
    return has(key) ? number(key, range) : fallback;
  }
  int integer(const std::string& key, int low);
  int integer_or(const std::string& key, int fallback, int low) { return has(key) ? integer(key, low) : fallback; }
  std::string text(const std::string& key);
  std::string text_or(const std::string& key, const std::string& fallback);
  /// The index of the text in `choices`.
  std::size_t choice(const std::string& key, const std::vector<std::string>& choices);
  JsonObject object(const std::string& key) { return {at(key, "an object"), file_, path_of(key)}; }
  /// The elements of an array of objects.
  std::vector<JsonObject> objects(const std::string& key);
  /// Pairs of numbers, the first ones strictly increasing from 0, the second ones not negative; at least one.
  std::vector<std::pair<double, double>> points(const std::string& key);
  /// The keys of an object whose keys are data.
  std::vector<std::string> keys() const;

  /// Throws if the object has a key that was not asked for.
  void refuse_others() const;
  /// Throws an error about `key`: "file: path.key PROBLEM".
  [[noreturn]] void fail(const std::string& key, const std::string& problem) const;

 private:
  const nlohmann::json& at(const std::string& key, const std::string& expected);
  std::string path_of(const std::string& key) const;

  const nlohmann::json& value_;
  const std::string file_;
  const std::string path_;
  std::vector<std::string> known_;  ///< keys that were asked for
};

}  // namespace tessera::tools
