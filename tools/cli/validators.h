// Validators for option values, beyond those of CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>

namespace tessera::tools {

/// A whole number from `low` to `high` in decimal digits. Use with transform(): "010" is ten, which CLI11 would read as
/// octal, and "-1" is not a large unsigned number.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);

/// A number from `low` to `high` that is neither NaN nor infinite.
CLI::Validator finite_number(double low = std::numeric_limits<double>::lowest(),
                             double high = std::numeric_limits<double>::max());

/// Refuses empty text, such as the value of an unset shell variable, for every option of `app` and its subcommands
/// except the hidden ones, which the tool passes to its own ranks.
void refuse_empty_values(CLI::App& app);

}  // namespace tessera::tools
