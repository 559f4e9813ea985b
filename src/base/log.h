// Logging to a sink that the program sets; without a sink, nothing is written.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// Severity of a message, ascending; `off` as a logger's level disables all messages.
enum class LogLevel : std::uint8_t { debug, info, warn, error, off };

/// Parses "debug", "info", "warn", "error", "off". Throws InvalidUsage.
TESSERA_API LogLevel parse_log_level(std::string_view name);
/// "debug", "info", "warn", "error", "off".
TESSERA_API std::string_view name_of(LogLevel level);

/// Thread-safe: calls of the sink are serialized. Shared by shared_ptr; a null pointer disables logging.
class TESSERA_API Logger {
 public:
  using Sink = std::function<void(LogLevel, std::string_view)>;  ///< what it throws is dropped
  /// `level`: the least severe level that is written.
  Logger(LogLevel level, Sink sink) : level_(level), sink_(std::move(sink)) {}
  /// True if write() passes a message of this level to the sink.
  bool enabled(LogLevel level) const noexcept { return level >= level_ && level != LogLevel::off; }
  /// Never throws: exceptions of the sink are swallowed, since destructors log too.
  void write(LogLevel level, std::string_view text) noexcept;

 private:
  const LogLevel level_;
  const Sink sink_;
  std::mutex mutex_;
};

}  // namespace tessera::base
