// What the values of options may be, beyond what CLI11 checks.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>

namespace tessera::tools {

/// A whole number from `low` to `high` in decimal digits. Use with transform(): "010" is ten, which CLI11 would read as
/// octal, and "-1" is no large unsigned number.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);

/// A number from `low` to `high` that is neither NaN nor infinite.
CLI::Validator finite_number(double low = std::numeric_limits<double>::lowest(),
                             double high = std::numeric_limits<double>::max());

/// Refuses the empty text, such as the value of a shell variable that is not set, for every option of `app` and of its
/// subcommands but the hidden ones, which the tool gives to its own ranks.
void refuse_empty_values(CLI::App& app);

}  // namespace tessera::tools
