#include "tessera/base/text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tessera::base {
namespace {

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
