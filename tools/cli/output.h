// Files that a command writes: checked before the work begins, replaced whole when it is done.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// Throws InvalidUsage where `path` can't be written: better before an hour of training than after. "" is no file.
void check_writable(std::string_view option, const std::string& path);

/// Replaces the file at once (written beside it, then renamed); pipes and devices are written as they are. Throws
/// SystemError.
void write_file(const std::string& path, std::string_view content);

/// Throws InvalidUsage where the output file `path` is one of the `inputs`, which it would replace.
void refuse_to_replace(std::string_view option, const std::string& path, const std::vector<std::string>& inputs);

/// `json` as text, on one line where `indent` is negative. Bytes that are not UTF-8, as in a file's name, become
/// U+FFFD.
std::string json_text(const nlohmann::ordered_json& json, int indent = -1);

/// What was checked is wrong: exit code 1.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// 1234567 -> "1.23 MB" (MB = 1e6), at most five characters of number.
std::string human_bytes(double bytes);

}  // namespace tessera::tools
