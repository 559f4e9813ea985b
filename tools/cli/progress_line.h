// The progress line of long work: one line of a terminal that is written over and over.
#pragma once

#include <string>
#include <string_view>

namespace tessera::tools {

/// Begins a line of a rank's standard output that its launcher shows as the progress line (LaunchSpec::progress).
inline constexpr std::string_view kProgressMark = "\x01progress ";

/// Writes to standard error, and only if that is a terminal. Output of a pipe or a file never contains it.
class ProgressLine {
 public:
  explicit ProgressLine(std::string prefix = "");
  ~ProgressLine() { hide(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  bool on() const { return on_; }
  /// Replaces the line. A text that is wider than the terminal is cut.
  void show(std::string_view text);
  /// Erases the line, so that other output can follow.
  void hide();

 private:
  const bool on_;
  const std::string prefix_;
  bool shown_ = false;
};

}  // namespace tessera::tools
