// The text of a notice: kind, three numbers, then free text to the end.
#include "tessera/comm/core/control_message.h"

#include <charconv>

#include "tessera/base/text.h"
#include "tessera/comm/failure.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMostText = 4096;

bool take_number(std::string_view& text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data() + text.size() || *end != ' ') return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

}  // namespace

std::string format_notice(const ControlMessage& notice) {
  return std::string(1, static_cast<char>(notice.kind)) + std::to_string(notice.communicator) + " " +
         std::to_string(notice.number) + " " + std::to_string(notice.value) + " " + notice.text.substr(0, kMostText);
}

std::optional<ControlMessage> parse_notice(std::string_view text) {
  constexpr std::string_view kKinds = "FQACL";  // loss and damage are never sent, only detected
  if (text.empty() || kKinds.find(text.front()) == std::string_view::npos) return std::nullopt;
  ControlMessage notice;
  notice.kind = static_cast<ControlMessage::Kind>(text.front());
  text.remove_prefix(1);
  if (!take_number(text, notice.communicator) || !take_number(text, notice.number) ||
      !take_number(text, notice.value) || text.size() > kMostText)
    return std::nullopt;
  if (notice.kind == ControlMessage::Kind::failure &&
      (notice.number == 0 || notice.number > static_cast<std::uint64_t>(FailureKind::backend)))
    return std::nullopt;
  notice.text = printable(text);
  return notice;
}

}  // namespace tessera::comm
