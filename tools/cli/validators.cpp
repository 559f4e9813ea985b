#include "tools/cli/validators.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

namespace tessera::tools {

CLI::Validator whole_number(std::uint64_t low, std::uint64_t high) {
  const auto parse = [low, high](std::string& text) {
    std::uint64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < low || value > high)
      return fmt::format("'{}' is not a whole number from {} to {}", text, low, high);
    text = std::to_string(value);
    return std::string();
  };
  return {parse, fmt::format("UINT in [{} - {}]", low, high)};
}

CLI::Validator finite_number(double low, double high) {
  const auto check = [low, high](std::string& text) {
    double value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    const bool number = error == std::errc() && stop == end && std::isfinite(value);
    if (number && value >= low && value <= high) return std::string();
    const bool bounded = low > std::numeric_limits<double>::lowest();
    return fmt::format("'{}' is not a finite number{}", text, bounded ? fmt::format(" of at least {}", low) : "");
  };
  return {check, ""};
}

CLI::Validator one_of(const std::vector<std::string>& words) { return CLI::IsMember(words); }

OptionValues list_of(const char* type, std::optional<CLI::Validator> check) {
  OptionValues values(type);
  values.check = std::move(check);
  values.list = true;
  return values;
}

CLI::Option* set_values(CLI::Option* option, const OptionValues& values, bool shows_default) {
  if (!values.type.empty()) option->type_name(values.type);
  if (values.check) option->transform(*values.check);
  if (values.list) option->delimiter(',');
  if (shows_default && option->get_description().find("(default") == std::string::npos) option->capture_default_str();
  return option;
}

void refuse_repeated_values(const CLI::App& app) {
  const std::vector<std::string> may_repeat = {"--betas", "--data", "--why"};
  for (const CLI::App* command : app.get_subcommands()) {
    for (const CLI::Option* option : command->get_options()) {
      if (option->get_delimiter() != ',' || std::ranges::count(may_repeat, option->get_name()) > 0) continue;
      for (const std::string& value : option->results())
        if (std::ranges::count(option->results(), value) > 1)
          throw CLI::ValidationError(option->get_name(), fmt::format("'{}' is given twice; once is enough", value));
    }
  }
}

void refuse_empty_values(CLI::App& app) {
  for (CLI::Option* option : app.get_options())
    if (option->get_expected_min() > 0 && option->get_type_size() != 0 && !option->get_group().empty())
      option->check([](const std::string& value) {
        return value.empty() ? "the value is empty; give one, or leave the option out" : std::string();
      });
  for (CLI::App* command : app.get_subcommands({})) refuse_empty_values(*command);
}

}  // namespace tessera::tools
