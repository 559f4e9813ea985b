// All access to the environment.
//
// A component declares each of its variables once, as a constant, and lists them in a function `variables()`; `tessera
// info --env` prints the union of those lists.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

/// The declaration of an environment variable. Its texts are literals or live as long.
struct EnvVariable {
  std::string_view name;           ///< "TESSERA_TIMEOUT"
  std::string_view default_value;  ///< default as it would be written; "" if unset has a meaning of its own
  std::string_view help;           ///< one line
};

/// Returns the value; empty if the variable is unset or empty. Thread-safe unless a thread calls setenv.
TESSERA_API std::optional<std::string> read_env(const EnvVariable& variable);

/// Returns the value, or the declared default if it is unset or empty.
TESSERA_API std::string env_or_default(const EnvVariable& variable);

/// Reads a variable of another component (a launcher, the C library), which Tessera doesn't declare.
TESSERA_API std::optional<std::string> read_foreign_env(const std::string& name);

/// Returns the names that begin with TESSERA_ and are set but not in `known`, to warn about misspellings.
TESSERA_API std::vector<std::string> unknown_variables(std::span<const EnvVariable> known);

/// Returns the environment as NAME=value for a child process, with `changes` added or overriding existing values.
TESSERA_API std::vector<std::string> environment_with(std::span<const std::pair<std::string, std::string>> changes);

}  // namespace tessera::base
