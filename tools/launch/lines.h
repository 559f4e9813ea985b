// Divides a stream of bytes into lines.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace tessera::tools {

class LineSplitter {
 public:
  /// Longer lines are split, so that a program without newlines can't fill the launcher's memory.
  static constexpr std::size_t kLongest = 16 * 1024 * 1024;

  /// Calls `line` for each complete line, without its newline.
  template <class F>
  void feed(std::string_view bytes, F&& line) {
    while (!bytes.empty()) {
      const std::size_t end = bytes.find('\n');
      if (end == std::string_view::npos) {
        rest_.append(bytes);
        if (rest_.size() >= kLongest) finish(line);
        return;
      }
      if (rest_.empty()) {
        line(bytes.substr(0, end));
      } else {
        rest_.append(bytes.substr(0, end));
        finish(line);
      }
      bytes.remove_prefix(end + 1);
    }
  }

  /// Calls `line` for the last line if it has no newline.
  template <class F>
  void finish(F&& line) {
    const std::string rest = std::move(rest_);
    rest_.clear();
    if (!rest.empty()) line(std::string_view(rest));
  }

 private:
  std::string rest_;
};

}  // namespace tessera::tools
