// Options of the command line and what values they take, beyond CLI11's own.
#pragma once

#include <CLI/CLI.hpp>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::tools {

/// A whole number from `low` to `high` in decimal digits. Use with transform(): "010" is ten, which CLI11 would read as
/// octal, and "-1" is not a large unsigned number.
CLI::Validator whole_number(std::uint64_t low, std::uint64_t high);

/// A number from `low` to `high` that is neither NaN nor infinite.
CLI::Validator finite_number(double low = std::numeric_limits<double>::lowest(),
                             double high = std::numeric_limits<double>::max());

/// One of these words.
CLI::Validator one_of(const std::vector<std::string>& words);

/// What an option takes: values of a type, as help shows it, that pass a check.
struct OptionValues {
  OptionValues() = default;
  OptionValues(const char* shown_type) : type(shown_type) {}           // NOLINT: shorter calls
  OptionValues(CLI::Validator checked) : check(std::move(checked)) {}  // NOLINT
  OptionValues(const char* shown_type, CLI::Validator checked) : type(shown_type), check(std::move(checked)) {}

  std::string type;  ///< "": that of the variable
  std::optional<CLI::Validator> check;
  bool list = false;  ///< several, separated by commas
};
OptionValues list_of(const char* type = "A,B", std::optional<CLI::Validator> check = {});

/// Sets what an option takes. Help shows its default, unless `shows_default` is false or the description has it.
CLI::Option* set_values(CLI::Option* option, const OptionValues& values, bool shows_default);

/// Adds an option with an argument. `name`, `value`, `help`: as those of CLI11.
template <class T>
CLI::Option* add_option(CLI::App& command, const std::string& name, T& value, const std::string& help,
                        const OptionValues& values = {}) {
  return set_values(command.add_option(name, value, help), values,
                    std::integral<T> || std::floating_point<T> || std::same_as<T, std::string>);
}

/// Refuses a value that stands twice in a list of the chosen subcommand, where once is enough. Throws CLI::ParseError.
void refuse_repeated_values(const CLI::App& app);

/// Refuses empty text, such as the value of an unset shell variable, for every option of `app` and its subcommands
/// except the hidden ones, which the tool passes to its own ranks.
void refuse_empty_values(CLI::App& app);

}  // namespace tessera::tools
