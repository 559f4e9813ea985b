#include "tools/cli/output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <iostream>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

bool is_replaceable(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  return status.type() == fs::file_type::not_found || status.type() == fs::file_type::regular;
}

std::string beside(const std::string& path) { return path + ".partial-" + std::to_string(::getpid()); }

bool is_fifo(const std::string& path) {
  std::error_code ignored;
  return fs::is_fifo(path, ignored);
}

/// Opens a file for writing. A FIFO that no process reads is an error: to wait for a reader could take forever.
base::UniqueFd open_output(const std::string& path, int flags) {
  const bool fifo = is_fifo(path);
  base::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags | (fifo ? O_NONBLOCK : 0), 0666));
  if (!fd && fifo && errno == ENXIO)
    throw base::SystemError("can't write '" + path + "': it is a FIFO that no process reads; start its reader first");
  if (!fd) throw base::system_error("can't write '" + path + "'");
  if (fifo) ::fcntl(fd.get(), F_SETFL, O_WRONLY);  // a slow reader is waited for
  return fd;
}

class File {
 public:
  explicit File(const std::string& path) : path_(path), fd_(open_output(path, O_TRUNC)) {}

  void write(std::string_view content) {
    while (!content.empty()) {
      const ssize_t written = ::write(fd_.get(), content.data(), content.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw base::system_error("can't write '" + path_ + "'");
      content.remove_prefix(static_cast<std::size_t>(written));
    }
  }

 private:
  const std::string path_;
  const base::UniqueFd fd_;
};

}  // namespace

void check_writable(std::string_view option, const std::string& path) {
  if (path.empty()) return;
  const std::string probe = is_replaceable(path) ? beside(path) : path;
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    throw base::InvalidUsage(std::string(option) + " '" + path + "' is a directory; name a file");
  try {
    base::UniqueFd fd = open_output(probe, 0);
    if (is_fifo(probe)) [[maybe_unused]]
      const int until_exit = fd.release();  // else its reader would see the end now
  } catch (const base::SystemError& error) {
    throw base::InvalidUsage(std::string(option) + ": " + error.what());
  }
  if (probe != path) ::unlink(probe.c_str());
}

void check_directory(const std::string& option, const std::string& directory, const std::string& file) {
  if (directory.empty()) return;
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) throw base::InvalidUsage(option + ": can't create '" + directory + "': " + error.message());
  check_writable(option, directory + "/" + file);
}

void refuse_to_replace(std::string_view option, const std::string& path, const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!path.empty() && fs::equivalent(path, input, error))
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

void write_file(const std::string& path, std::string_view content) {
  if (!is_replaceable(path)) {
    File(path).write(content);
    return;
  }
  const std::string partial = beside(path);
  try {
    File(partial).write(content);
    if (::rename(partial.c_str(), path.c_str()) != 0) throw base::system_error("can't write '" + path + "'");
  } catch (...) {
    ::unlink(partial.c_str());
    throw;
  }
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

}  // namespace tessera::tools
