// Output files of a command: checked before the work starts, replaced as a whole when it is done.
#pragma once

#include <fmt/format.h>

#include <concepts>
#include <cstdio>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/file.h"

namespace tessera::tools {

/// Writes text to a stream. What others put into files and names reaches the terminal only here: control characters
/// other than newlines become `\xNN`.
void print_text(std::FILE* stream, std::string_view text);
/// Formats as fmt::print() does, then print_text().
template <class... Values>
void print_clean(std::FILE* stream, fmt::format_string<Values...> format, Values&&... values) {
  print_text(stream, fmt::format(format, std::forward<Values>(values)...));
}
template <class... Values>
void print_clean(fmt::format_string<Values...> format, Values&&... values) {
  print_clean(stdout, format, std::forward<Values>(values)...);
}

/// print_text() to standard output, at once.
void print_now(std::string_view text);

/// Prints `json` in ASCII, on one line if `indent` is negative.
void print_json(const nlohmann::ordered_json& json, int indent = -1);

/// Throws InvalidUsage if `path` can't be written, so that the error comes before an hour of training. "" is no file. A
/// FIFO needs a reader and stays open until the process exits.
void check_writable(std::string_view option, const std::string& path);

/// Creates a directory and checks that `file` can be written in it, and that it isn't the checkpoint of a step. "" is
/// no directory. Throws InvalidUsage.
void check_directory(const std::string& option, const std::string& directory, const std::string& file);

/// Opens a file to which lines are added while the work goes on: from its beginning, or behind what it has. Invalid,
/// with errno, if it can't be opened; EWOULDBLOCK: another process writes it.
base::UniqueFd open_lines(const std::string& path, bool append);

/// Writes all of it to a descriptor. False: errno says why not.
bool write_all(int file, std::string_view content);

/// Replaces the file atomically (writes a file beside it, then renames); writes pipes and devices directly. Throws
/// SystemError.
void write_file(const std::string& path, std::string_view content);

/// `json` as a file. "" is no file.
void write_json(const std::string& path, const nlohmann::ordered_json& json, int indent = 1);

/// An output file by the option that names it; "" is no file.
using Outputs = std::vector<std::pair<std::string_view, std::string>>;
/// Throws InvalidUsage if one of the files can't be written, as check_writable(), is one of the `inputs`, which it
/// would replace, or is named twice.
void check_outputs(const Outputs& outputs, const std::vector<std::string>& inputs = {});

/// `json` as text, on one line if `indent` is negative. Bytes that are not UTF-8, as in a file's name, become U+FFFD.
std::string json_text(const nlohmann::ordered_json& json, int indent = -1);

/// The JSON object that a rank printed as a line for this program. Null for another line, such as one of a vendor's
/// library, which is passed on to stderr.
nlohmann::ordered_json message_of_rank(std::string_view line);

/// A check failed: exit code 1.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// 1234567 -> "1.23 MB" (MB = 1e6), at most five characters for the number.
std::string human_bytes(double bytes);
std::string human_bytes(std::integral auto bytes) { return human_bytes(static_cast<double>(bytes)); }

/// "10,844,160"
std::string with_commas(std::string digits);
std::string with_commas(std::integral auto number) { return with_commas(std::to_string(number)); }

/// The text with `by` in place of each `what`.
std::string replaced(std::string_view text, char what, std::string_view by);

/// "a", "a and b", "a, b and c".
std::string joined_by_and(const std::vector<std::string>& words);

/// "a, b, c" with `between` ", ".
std::string joined_by(const auto& items, std::string_view between) {
  return fmt::format("{}", fmt::join(items, between));
}

/// What `of`, a function or a member, gives for each item.
template <class Items, class Of>
auto each_of(const Items& items, Of&& of) {
  std::vector<std::decay_t<std::invoke_result_t<Of&, decltype(*std::begin(items))>>> all;
  for (const auto& item : items) all.push_back(std::invoke(of, item));
  return all;
}

/// The rows in columns, each row as a line: the first column is left-aligned, all others right-aligned. All rows have
/// the length of the first.
std::string text_table(const std::vector<std::vector<std::string>>& rows);

/// A word of the tables and pictures.
struct Word {
  std::string_view name;
  std::string_view meaning;
};

/// Those of docs/glossary.md, from which the build makes this function; in alphabetical order.
std::span<const Word> words();

}  // namespace tessera::tools
