// Parsing and formatting of sizes, durations and names in options and environment variables.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// Parses "64K", "8M", "1G" (powers of two) or plain bytes. Throws InvalidUsage that names `what`.
TESSERA_API std::uint64_t parse_size(std::string_view text, std::string_view what);

/// Parses "500ms", "6s", "2m", "1h"; above zero. Throws InvalidUsage that names `what`.
TESSERA_API std::chrono::milliseconds parse_duration(std::string_view text, std::string_view what);

/// Parses an integer within [low, high]. Throws InvalidUsage that names `what`.
TESSERA_API std::int64_t parse_integer(std::string_view text, std::string_view what, std::int64_t low,
                                       std::int64_t high);

/// Parses "0|1|true|false|on|off|yes|no". Throws InvalidUsage that names `what`.
TESSERA_API bool parse_flag(std::string_view text, std::string_view what);

/// The index of `name` in `known`. Throws InvalidUsage "unknown WHAT 'NAME'; known: ..." that lists them.
TESSERA_API std::size_t parse_name(std::string_view name, std::string_view what,
                                   std::span<const std::string_view> known);

/// "500ms", "6s", "5m": the shortest exact spelling.
TESSERA_API std::string format_duration(std::chrono::milliseconds duration);

/// "64K", "8M", "12345": the shortest exact spelling.
TESSERA_API std::string format_size(std::uint64_t bytes);

}  // namespace tessera::base
