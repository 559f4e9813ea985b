#include "tessera/base/env.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace tessera::base {

std::optional<std::string> read_foreign_env(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::string> read_env(const EnvVariable& variable) {
  return read_foreign_env(std::string(variable.name));
}

std::string env_or_default(const EnvVariable& variable) {
  return read_env(variable).value_or(std::string(variable.default_value));
}

std::vector<std::string> unknown_variables(std::span<const EnvVariable> known) {
  std::vector<std::string> unknown;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    const std::string_view name = line.substr(0, line.find('='));
    if (!name.starts_with("TESSERA_")) continue;
    const bool found = std::ranges::any_of(known, [&](const EnvVariable& v) { return v.name == name; });
    if (!found) unknown.emplace_back(name);
  }
  return unknown;
}

std::vector<std::string> environment_with(std::span<const std::pair<std::string, std::string>> changes) {
  std::vector<std::string> result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view line(*entry);
    const std::string_view name = line.substr(0, line.find('='));
    const bool changed = std::ranges::any_of(changes, [&](const auto& change) { return change.first == name; });
    if (!changed) result.emplace_back(line);
  }
  for (const auto& [name, value] : changes) result.push_back(name + "=" + value);
  return result;
}

}  // namespace tessera::base
