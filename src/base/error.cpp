#include "tessera/base/error.h"

#include <array>
#include <cerrno>
#include <system_error>

#include "tessera/base/log.h"
#include "tessera/base/parse.h"

namespace tessera::base {

// Out of line, so that each class has a single type information across modules.
Error::~Error() = default;
InvalidUsage::~InvalidUsage() = default;
Unsupported::~Unsupported() = default;
Mismatch::~Mismatch() = default;
Timeout::~Timeout() = default;
PeerLost::~PeerLost() = default;
Aborted::~Aborted() = default;
BackendError::~BackendError() = default;
SystemError::~SystemError() = default;

void throw_error(std::string_view kind, const std::string& text) {
  if (kind == "InvalidUsage") throw InvalidUsage(text);
  if (kind == "Unsupported") throw Unsupported(text);
  if (kind == "Mismatch") throw Mismatch(text);
  if (kind == "Timeout") throw Timeout(text);
  if (kind == "PeerLost") throw PeerLost(text);
  if (kind == "Aborted") throw Aborted(text);
  if (kind == "BackendError") throw BackendError(text);
  throw SystemError(text);
}

SystemError system_error(std::string_view what, int code) {
  if (code < 0) code = errno;
  return SystemError(std::string(what) + ": " + std::generic_category().message(code));
}

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
