#include "tessera/base/parse.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::base {
namespace {

struct Number {
  std::int64_t value = 0;
  std::string_view unit;
  bool valid = false;
};

Number split_number(std::string_view text) {
  Number number;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number.value);
  number.valid = error == std::errc{};
  if (number.valid) number.unit = text.substr(static_cast<std::size_t>(end - text.data()));
  return number;
}

/// The length in bytes of the character that begins here; 0 for a control character or invalid UTF-8.
std::size_t character(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t first = at(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const std::size_t length = first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 0;
  if (length == 0 || first >= 0xf5 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((at(i) & 0xc0U) != 0x80) return 0;
  return first == 0xc2 && at(1) < 0xa0 ? 0 : length;  // the control characters above ASCII
}

}  // namespace

std::uint64_t parse_size(std::string_view text, std::string_view what) {
  const Number number = split_number(text);
  int shift = -1;
  if (number.unit.empty()) shift = 0;
  if (number.unit == "K") shift = 10;
  if (number.unit == "M") shift = 20;
  if (number.unit == "G") shift = 30;
  if (!number.valid || shift < 0 || number.value < 0 ||
      number.value > (std::numeric_limits<std::int64_t>::max() >> shift))
    throw InvalidUsage(std::string(what) + ": '" + std::string(text) + "' is not a size; write 4096, 64K, 8M or 1G");
  return static_cast<std::uint64_t>(number.value) << shift;
}

std::chrono::milliseconds parse_duration(std::string_view text, std::string_view what) {
  const Number number = split_number(text);
  std::int64_t scale = 0;
  if (number.unit == "ms") scale = 1;
  if (number.unit == "s") scale = 1000;
  if (number.unit == "m") scale = 60'000;
  if (number.unit == "h") scale = 3'600'000;
  constexpr std::int64_t kMaxMilliseconds = 365LL * 24 * 3'600'000;
  if (!number.valid || scale == 0 || number.value <= 0 || number.value > kMaxMilliseconds / scale)
    throw InvalidUsage(std::string(what) + ": '" + std::string(text) + "' is not a duration; write 500ms, 6s or 2m");
  return std::chrono::milliseconds(number.value * scale);
}

std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low, std::int64_t high) {
  const Number number = split_number(text);
  if (!number.valid || !number.unit.empty() || number.value < low || number.value > high) {
    const std::string upper =
        high == std::numeric_limits<std::int64_t>::max() ? " or more" : " to " + std::to_string(high);
    throw InvalidUsage(std::string(what) + ": '" + std::string(text) + "' is not a whole number from " +
                       std::to_string(low) + upper);
  }
  return number.value;
}

bool parse_flag(std::string_view text, std::string_view what) {
  if (text == "1" || text == "true" || text == "on" || text == "yes") return true;
  if (text == "0" || text == "false" || text == "off" || text == "no") return false;
  throw InvalidUsage(std::string(what) + ": '" + std::string(text) + "' is neither 1 nor 0");
}

std::size_t parse_name(std::string_view name, std::string_view what, std::span<const std::string_view> known) {
  const auto found = std::ranges::find(known, name);
  if (found != known.end()) return static_cast<std::size_t>(found - known.begin());
  std::string all;
  for (const std::string_view each : known) all += std::string(" ").append(each);
  throw InvalidUsage("unknown " + std::string(what) + " '" + std::string(name) + "'; known:" + all);
}

std::string format_duration(std::chrono::milliseconds duration) {
  const std::int64_t ms = duration.count();
  if (ms % 1000 != 0 || ms == 0) return std::to_string(ms) + "ms";
  if (ms % 60'000 != 0) return std::to_string(ms / 1000) + "s";
  if (ms % 3'600'000 != 0) return std::to_string(ms / 60'000) + "m";
  return std::to_string(ms / 3'600'000) + "h";
}

std::string format_size(std::uint64_t bytes) {
  if (bytes != 0 && bytes % (1ULL << 30) == 0) return std::to_string(bytes >> 30) + "G";
  if (bytes != 0 && bytes % (1ULL << 20) == 0) return std::to_string(bytes >> 20) + "M";
  if (bytes != 0 && bytes % (1ULL << 10) == 0) return std::to_string(bytes >> 10) + "K";
  return std::to_string(bytes);
}

std::string printable(std::string_view text, std::string_view kept) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string shown;
  while (!text.empty()) {
    const std::size_t length = kept.find(text.front()) != std::string_view::npos ? 1 : character(text);
    if (length > 0) {
      shown += text.substr(0, length);
    } else {
      const auto byte = static_cast<std::uint8_t>(text.front());
      shown += std::string("\\x") + kDigits[byte >> 4U] + kDigits[byte & 15U];
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return shown;
}

}  // namespace tessera::base
