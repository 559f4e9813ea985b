// JSON of files that others wrote: parsed with limits, and read by type.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

inline constexpr int kMaxJsonDepth = 64;
inline constexpr std::size_t kMaxJsonValues = std::size_t{1} << 23;
/// Of one object that keeps the order of its keys, which looks through all of them.
inline constexpr std::size_t kMaxOrderedKeys = 4096;

/// Parses a document. Throws InvalidUsage "ORIGIN PROBLEM", at the first such place, if the text is not JSON, is nested
/// too deeply, has too many values, a number that is too large, or an object with a key twice.
/// Json: nlohmann::json or nlohmann::ordered_json.
template <class Json>
Json parse_json(std::string_view text, const std::string& origin);
extern template TESSERA_API nlohmann::json parse_json<nlohmann::json>(std::string_view, const std::string&);
extern template TESSERA_API nlohmann::ordered_json parse_json<nlohmann::ordered_json>(std::string_view,
                                                                                      const std::string&);

/// A value for an error: short, on one line, in ASCII.
TESSERA_API std::string brief(const nlohmann::json& value);

/// A value of a document, which outlives it, with its place in the document. Conversions are exact: a number converts
/// to an integer only if it is written as one and the type holds it. Errors are InvalidUsage "ORIGIN: PATH PROBLEM".
class TESSERA_API JsonReader {
 public:
  /// `path`: of the value in its document; "" for the document.
  JsonReader(const nlohmann::json& value, std::string origin, std::string path = "");

  const nlohmann::json& json() const { return *value_; }
  /// Whether this object has the key.
  bool has(std::string_view key) const;
  JsonReader at(std::string_view key) const;  ///< of an object
  JsonReader at(std::size_t index) const;     ///< of an array
  std::size_t size() const;                   ///< of an array
  std::vector<JsonReader> elements() const;   ///< of an array
  /// Keys and values of an object.
  std::vector<std::pair<std::string, JsonReader>> members() const;

  static constexpr std::int64_t kLargest = std::int64_t{1} << 53;  ///< up to it sums of a few don't overflow
  /// A whole number from `low` to `high`.
  std::int64_t integer(std::int64_t low, std::int64_t high = kLargest) const;
  /// A number from `low`, where the smallest positive one stands for all above 0, to `high`.
  double number(double low, double high = std::numeric_limits<double>::max()) const;
  /// As number(); null, which stands for NaN and infinity, is NaN.
  double number_or_nan() const;
  std::string text() const;
  bool flag() const;

  /// By type: unsigned integers are 0 or more, all integers at most kLargest, floating-point numbers finite; also
  /// arrays of such values of a fixed or any length, and objects of strings.
  template <class T>
  T get() const {
    if constexpr (std::same_as<T, bool>) {
      return flag();
    } else if constexpr (std::same_as<T, std::string>) {
      return text();
    } else if constexpr (std::integral<T>) {
      using Limits = std::numeric_limits<T>;
      return static_cast<T>(
          integer(std::is_signed_v<T> ? std::max<std::int64_t>(Limits::min(), -kLargest) : 0,
                  sizeof(T) < sizeof(kLargest) ? static_cast<std::int64_t>(Limits::max()) : kLargest));
    } else if constexpr (std::floating_point<T>) {
      return static_cast<T>(number(std::numeric_limits<T>::lowest(), std::numeric_limits<T>::max()));
    } else if constexpr (std::same_as<T, std::map<std::string, std::string>>) {
      T all;
      for (const auto& [key, value] : members()) all.emplace(key, value.text());
      return all;
    } else if constexpr (requires(T t, typename T::value_type v) { t.push_back(v); }) {
      T all;
      for (const JsonReader& element : elements()) all.push_back(element.get<typename T::value_type>());
      return all;
    } else {  // an array of a fixed length
      T all{};
      if (size() != all.size()) refuse("an array of " + std::to_string(all.size()));
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = at(i).get<typename T::value_type>();
      return all;
    }
  }
  template <class T>
  operator T() const {  // NOLINT: as of nlohmann's values
    return get<T>();
  }
  template <class T>
  T value(std::string_view key, T otherwise) const {
    return has(key) ? at(key).get<T>() : otherwise;
  }

  [[noreturn]] void fail(const std::string& problem) const;

 private:
  /// Throws that the value is not `expected`.
  [[noreturn]] void refuse(const std::string& expected) const;
  void expect_object() const;

  const nlohmann::json* value_;
  std::string origin_, path_;
};

}  // namespace tessera::base
