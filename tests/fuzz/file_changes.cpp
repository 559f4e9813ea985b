#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/json/json_reader.h"
#include "tests/fuzz/file_subjects.h"

namespace tessera::fuzz {
namespace {

using nlohmann::ordered_json;

std::string little_endian(std::uint64_t value) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i) & 0xffU);
  return bytes;
}

std::string interesting_text(const Draw& draw) {
  static const std::array<std::string, 8> kTexts = {
      "", "\x1b[31m", "nan", "f64", "-1", std::string(70'000, 'x'), "\xf0\x9f\x98\x80\x7f\xc2\x9b", "../../x"};
  return kTexts.at(draw(kTexts.size()));
}

ordered_json interesting_value(const Draw& draw) {
  static const std::array<ordered_json, 24> kValues = {
      0,
      1,
      2,
      -1,
      3,
      7,
      255,
      65536,
      1 << 20,
      std::int64_t{1} << 31,
      -(std::int64_t{1} << 31),
      std::int64_t{1} << 32,
      (std::int64_t{1} << 53) - 1,
      std::int64_t{1} << 61,
      std::int64_t{1} << 62,
      INT64_MAX,
      INT64_MIN,
      UINT64_MAX,
      std::uint64_t{1} << 63,
      0.5,
      -1e300,
      nullptr,
      true,
      ordered_json::array({ordered_json::array(), ordered_json::object()})};
  const std::size_t which = draw(kValues.size() + 1);
  return which < kValues.size() ? kValues.at(which) : ordered_json(interesting_text(draw));
}

void collect(ordered_json& value, std::vector<ordered_json*>& all) {
  all.push_back(&value);
  if (value.is_structured())
    for (ordered_json& inner : value) collect(inner, all);
}

constexpr const char* kDeep = "@deep@";

void change_json(ordered_json& document, const Draw& draw) {
  std::vector<ordered_json*> all;
  collect(document, all);
  ordered_json& at = *all[draw(all.size())];
  const ordered_json other = *all[draw(all.size())];
  switch (draw(8)) {
    case 0:
      at = other;
      break;
    case 1:
      at = kDeep;
      break;
    case 2:
      if (at.is_array() && !at.empty()) at.push_back(at[draw(at.size())]);
      break;
    case 3:
      if (at.is_array() && !at.empty()) at.erase(at.begin() + static_cast<std::ptrdiff_t>(draw(at.size())));
      break;
    case 4:
      if (at.is_object() && !at.empty()) {
        const auto member = std::next(at.begin(), static_cast<std::ptrdiff_t>(draw(at.size())));
        const ordered_json value = member.value();
        at.erase(member);
        if (draw(2) == 0) at[interesting_text(draw)] = value;
      }
      break;
    case 5:
      if (at.is_number_integer())  // the least and the greatest are neighbors
        at = static_cast<std::int64_t>(at.get<std::uint64_t>() + (draw(2) == 0 ? 1 : ~std::uint64_t{0}));
      break;
    default:
      at = interesting_value(draw);
      break;
  }
}

void change_bytes(std::string& bytes, const Draw& draw) {
  if (bytes.empty()) return;
  const std::size_t at = draw(bytes.size());
  switch (draw(5)) {
    case 0:
      bytes[at] = static_cast<char>(draw(256));
      break;
    case 1:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << draw(8)));
      break;
    case 2:
      bytes.insert(at, 1 + draw(9), static_cast<char>(draw(256)));
      break;
    case 3:
      bytes.erase(at, 1 + draw(9));
      break;
    default:
      bytes.resize(at);
      break;
  }
}

/// Null if the text is no JSON any more, or nested too deeply by an earlier change.
ordered_json parsed(const std::string& text) {
  try {
    return base::parse_json<ordered_json>(text, "it");
  } catch (const base::InvalidUsage&) {
    return nullptr;
  }
}

/// As JSON if it is some, or else as bytes.
void change_text(std::string& text, const Draw& draw) {
  ordered_json document = draw(8) == 0 ? nullptr : parsed(text);
  if (!document.is_structured()) return change_bytes(text, draw);
  change_json(document, draw);
  text = document.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  const std::string mark = '"' + std::string(kDeep) + '"';
  if (const std::size_t at = text.find(mark); at != std::string::npos) {
    const std::size_t depth = 60 + draw(3) * 100'000;
    text.replace(at, mark.size(), std::string(depth, '[') + std::string(depth, ']'));
  }
}

/// The header as JSON, whose length fits, or the bytes.
void change_safetensors(std::string& bytes, const Draw& draw) {
  std::uint64_t length = 0;
  if (bytes.size() >= 8)
    for (std::size_t i = 8; i-- > 0;) length = length * 256 + static_cast<std::uint8_t>(bytes[i]);
  if (bytes.size() < 8 || length > bytes.size() - 8 || draw(3) == 0) return change_bytes(bytes, draw);
  std::string header = bytes.substr(8, length);
  change_text(header, draw);
  bytes = little_endian(header.size()) + header + bytes.substr(8 + length);
}

}  // namespace

Files changed(const Subject& subject, const Draw& draw) {
  Files files = subject.files;
  for (std::size_t times = 1 + draw(4); times > 0; --times) {
    auto& [name, content] = *std::next(files.begin(), static_cast<std::ptrdiff_t>(draw(files.size())));
    if (name.ends_with(".safetensors"))
      change_safetensors(content, draw);
    else if (name.ends_with(".json"))
      change_text(content, draw);
    else
      change_bytes(content, draw);
  }
  if (subject.repair && draw(8) != 0) subject.repair(files);
  return files;
}

}  // namespace tessera::fuzz
