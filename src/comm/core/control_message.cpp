// The text of a notice: kind, three numbers, then free text to the end.
#include "tessera/comm/core/control_message.h"

#include <charconv>

#include "tessera/base/text.h"
#include "tessera/comm/failure.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxText = 4096;

bool parse_number(std::string_view& text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data() + text.size() || *end != ' ') return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

}  // namespace

std::string format_message(const ControlMessage& message) {
  return std::string(1, static_cast<char>(message.kind)) + std::to_string(message.communicator) + " " +
         std::to_string(message.number) + " " + std::to_string(message.value) + " " + message.text.substr(0, kMaxText);
}

std::optional<ControlMessage> parse_message(std::string_view text) {
  constexpr std::string_view kKinds = "FQACGSL";  // loss and damage are never sent, only detected
  if (text.empty() || kKinds.find(text.front()) == std::string_view::npos) return std::nullopt;
  ControlMessage message;
  message.kind = static_cast<ControlMessage::Kind>(text.front());
  text.remove_prefix(1);
  if (!parse_number(text, message.communicator) || !parse_number(text, message.number) ||
      !parse_number(text, message.value) || text.size() > kMaxText)
    return std::nullopt;
  if (message.kind == ControlMessage::Kind::failure &&
      (message.number == 0 || message.number > static_cast<std::uint64_t>(FailureKind::backend)))
    return std::nullopt;
  message.text = printable(text);
  return message;
}

}  // namespace tessera::comm
