#include "tessera/base/log.h"

#include <array>

#include "tessera/base/parse.h"

namespace tessera::base {
namespace {
constexpr std::array<std::string_view, 5> kNames = {"debug", "info", "warn", "error", "off"};
}

std::string_view name_of(LogLevel level) { return kNames[static_cast<std::size_t>(level)]; }

LogLevel parse_log_level(std::string_view name) { return static_cast<LogLevel>(parse_name(name, "log level", kNames)); }

void Logger::write(LogLevel level, std::string_view text) noexcept {
  if (!enabled(level) || !sink_) return;
  try {
    const std::lock_guard lock(mutex_);
    sink_(level, text);
  } catch (...) {  // see the header
  }
}

}  // namespace tessera::base
