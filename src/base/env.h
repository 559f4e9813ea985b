// The one place that reads the environment.
//
// An owner declares each of its variables once, as a constant, and lists them in a function `variables()`; `tessera info
// --env` prints the union of those lists.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

struct EnvVariable {
  std::string_view name;           ///< "TESSERA_TIMEOUT"
  std::string_view default_value;  ///< as it would be written; "" where unset means something of its own
  std::string_view help;           ///< one line
};

/// The value that is set, or nothing where the variable is unset or empty. Thread-safe unless somebody calls setenv.
TESSERA_API std::optional<std::string> read_env(const EnvVariable& variable);

/// The value that is set, else the declared default.
TESSERA_API std::string env_or_default(const EnvVariable& variable);

/// Variables that belong to others (launchers, the C library); read, never declared as ours.
TESSERA_API std::optional<std::string> read_foreign_env(const std::string& name);

/// Names that begin with TESSERA_ and are set but not among `known`: a misspelling is worth a warning.
TESSERA_API std::vector<std::string> unknown_variables(std::span<const EnvVariable> known);

/// The whole environment as NAME=value, with `changes` set (also where they were there before): what a child process is given.
TESSERA_API std::vector<std::string> environment_with(std::span<const std::pair<std::string, std::string>> changes);

}  // namespace tessera::base
