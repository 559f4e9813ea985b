#include "tools/cli/output.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iostream>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

/// A file that every checkpoint of a step has.
constexpr const char* kOfStep = "rank-00000.json";

bool is_replaceable(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return status.type() == fs::file_type::not_found || status.type() == fs::file_type::regular;
}

bool is_fifo(const std::string& path) {
  std::error_code ignored;
  return fs::is_fifo(path, ignored);
}

/// The file that a link leads to, so that it is written and not the link replaced.
std::string target_of(const std::string& path) {
  std::error_code error;
  const fs::path target = fs::is_symlink(path, error) ? fs::weakly_canonical(path, error) : fs::path(path);
  return error || target.empty() ? path : target.string();
}

/// Standard output or error, if it is the file at `path`, as /dev/stdout is: it has a place in the file that others
/// share. Else none.
base::UniqueFd stream_at(const std::string& path) {
  struct stat file {
  }, stream{};
  if (::stat(path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) return {};
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO})
    if (::fstat(fd, &stream) == 0 && stream.st_dev == file.st_dev && stream.st_ino == file.st_ino) {
      std::fflush(stdout);
      return base::UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    }
  return {};
}

/// A device, pipe or FIFO, opened for writing; or a new file beside `path`, which replaces it. A FIFO that no process
/// reads is an error: to wait for a reader could take forever.
base::NewFile open_output(const std::string& path) {
  base::NewFile file;
  if (file.fd = stream_at(path); file.fd) return file;
  if (is_replaceable(path)) {
    file = base::create_beside(path, ".partial-", O_WRONLY);
    if (!file.fd) throw base::system_error("can't write '" + path + "'", file.code);
    return file;
  }
  const bool fifo = is_fifo(path);
  file.fd = base::UniqueFd(::open(path.c_str(), O_WRONLY | O_CLOEXEC | (fifo ? O_NONBLOCK : 0)));
  if (!file.fd && fifo && errno == ENXIO)
    throw base::SystemError("can't write '" + path + "': it is a FIFO that no process reads; start its reader first");
  if (!file.fd) throw base::system_error("can't write '" + path + "'");
  if (fifo) ::fcntl(file.fd.get(), F_SETFL, O_WRONLY);  // a slow reader is waited for
  return file;
}

}  // namespace

void print_text(std::FILE* stream, std::string_view text) {
  const std::string clean = base::printable(text, "\n");
  std::fwrite(clean.data(), 1, clean.size(), stream);
}

void print_now(std::string_view text) {
  print_text(stdout, text);
  std::fflush(stdout);
}

void print_json(const nlohmann::ordered_json& json, int indent) {
  print_now(json.dump(indent, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void check_writable(std::string_view option, const std::string& path) {
  if (path.empty()) return;
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    throw base::InvalidUsage(std::string(option) + " '" + path + "' is a directory; name a file");
  try {
    base::NewFile file = open_output(target_of(path));
    if (!file.path.empty()) ::unlink(file.path.c_str());
    if (is_fifo(path)) [[maybe_unused]]
      const int until_exit = file.fd.release();  // else its reader would see the end now
  } catch (const base::SystemError& error) {
    throw base::InvalidUsage(std::string(option) + ": " + error.what());
  }
}

void check_directory(const std::string& option, const std::string& directory, const std::string& file) {
  if (directory.empty()) return;
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) throw base::InvalidUsage(option + ": can't create '" + directory + "': " + error.message());
  if (fs::exists(fs::path(directory) / kOfStep, error))
    throw base::InvalidUsage(option + " '" + directory +
                             "' is the checkpoint of a step, which it would change; name another directory");
  check_writable(option, directory + "/" + file);
}

void check_outputs(const Outputs& outputs, const std::vector<std::string>& inputs) {
  std::map<std::string, std::string_view> seen;
  for (const auto& [option, path] : outputs) {
    check_writable(option, path);
    std::error_code ignored;
    if (!path.empty() && fs::exists(fs::path(path).parent_path() / kOfStep, ignored))
      throw base::InvalidUsage(
          fmt::format("{} '{}' is in the checkpoint of a step, which it would change; name another "
                      "file",
                      option, path));
    if (!path.empty() && is_replaceable(path))
      if (const auto [first, is_new] = seen.emplace(fs::weakly_canonical(path, ignored).string(), option); !is_new)
        throw base::InvalidUsage(
            fmt::format("{} '{}' is also {}'s file; name another one", option, path, first->second));
    for (const std::string& input : inputs)
      if (std::error_code error; !path.empty() && fs::equivalent(path, input, error))
        throw base::InvalidUsage(std::string(option) + " '" + path + "' is the input '" + input +
                                 "', which it would replace; name another file");
  }
}

nlohmann::ordered_json message_of_rank(std::string_view line) {
  nlohmann::ordered_json message = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (message.is_object()) return message;
  std::cerr << line << '\n';
  return nullptr;
}

std::string json_text(const nlohmann::ordered_json& json, int indent) {
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

base::UniqueFd open_lines(const std::string& path, bool append) {
  if (base::UniqueFd stream = stream_at(path)) return stream;
  base::UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (append ? O_APPEND : 0), 0666));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return file;
  const bool used = ::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;  // some systems have no locks
  if (used || (!append && ::ftruncate(file.get(), 0) != 0)) file.reset();
  return file;
}

bool write_all(int file, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(file, content.data(), content.size());
    if (written < 0 && errno != EINTR) return false;
    content.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
  }
  return true;
}

void write_file(const std::string& path, std::string_view content) {
  const std::string target = target_of(path);
  base::NewFile file = open_output(target);
  try {
    if (!write_all(file.fd.get(), content) || (!file.path.empty() && ::rename(file.path.c_str(), target.c_str()) != 0))
      throw base::system_error("can't write '" + path + "'");
  } catch (...) {
    if (!file.path.empty()) ::unlink(file.path.c_str());
    throw;
  }
}

void write_json(const std::string& path, const nlohmann::ordered_json& json, int indent) {
  if (!path.empty()) write_file(path, json_text(json, indent) + "\n");
}

std::string human_bytes(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < kUnits.size()) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, kUnits[unit]);
}

std::string with_commas(std::string digits) {
  const std::size_t first = digits[0] == '-' ? 1 : 0;
  for (std::size_t at = digits.size(); at > first + 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

std::string replaced(std::string_view text, char what, std::string_view by) {
  std::string result;
  for (const char c : text) result += c == what ? by : std::string_view(&c, 1);
  return result;
}

std::string joined_by_and(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? " and " : ", ") + words[i];
  return text;
}

std::string text_table(const std::vector<std::vector<std::string>>& rows) {
  if (rows.empty()) return "";
  std::vector<std::size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i)
      text += i == 0 ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("  {:>{}}", row[i], widths[i]);
    text += '\n';
  }
  return text;
}

}  // namespace tessera::tools
