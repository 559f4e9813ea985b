// The output of one rank: read from its pipes, divided into lines and forwarded.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/file.h"
#include "tools/launch/launcher.h"
#include "tools/launch/process.h"

namespace tessera::tools {

/// Divides a stream of bytes into lines.
class LineSplitter {
 public:
  /// Longer lines are split, so that a program without newlines can't fill the launcher's memory.
  static constexpr std::size_t kMaxLine = 16 * 1024 * 1024;

  /// Calls `line` for each complete line, without its newline.
  template <class F>
  void feed(std::string_view bytes, F&& line) {
    while (!bytes.empty()) {
      const std::size_t end = bytes.find('\n');
      if (end == std::string_view::npos) {
        rest_.append(bytes);
        if (rest_.size() >= kMaxLine) finish(line);
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

/// Reads what has arrived at a source that doesn't block, and calls `line` for each line. At its end, calls it for the
/// last one too, and closes the source.
void read_lines(base::UniqueFd& source, LineSplitter& lines, const std::function<void(std::string_view line)>& line);

/// Writes to a standard stream without waiting for its reader: unwritten output is kept.
class Outlet {
 public:
  explicit Outlet(int stream) : stream_(stream) {}
  /// Appends, and writes what the stream accepts now.
  void write(std::string_view text);
  /// Descriptor to poll for POLLOUT; -1: nothing is left to write.
  int waiting() const { return empty() ? -1 : stream_; }
  /// Writes what the stream accepts now.
  void flush();
  bool empty() const { return kept_.size() == written_; }
  /// True if so much is kept that no more should be appended.
  bool full() const { return kept_.size() - written_ > kMaxPending; }
  /// errno of a failed write, after which nothing more is written; 0: none.
  int error() const { return error_; }

 private:
  static constexpr std::size_t kMaxPending = std::size_t{1} << 20;
  const int stream_;
  std::string kept_;
  std::size_t written_ = 0;  ///< of `kept_`
  int error_ = 0;
};

class RankOutput {
 public:
  /// Of a rank, or under a prefix (`rank` 0) of all ranks and the program that starts them. `plan` and the standard
  /// streams, to which it is forwarded, outlive it. Throws InvalidUsage if the log can't be written.
  RankOutput(const LaunchSpec& plan, int rank, Outlet& output, Outlet& errors);

  /// Write ends for the rank; detach() closes them in this process.
  int child_output() const { return output_pipe_.write_end.get(); }
  int child_errors() const { return errors_pipe_.write_end.get(); }
  void detach() {
    output_pipe_.write_end.reset();
    errors_pipe_.write_end.reset();
  }

  /// Descriptors to poll; -1 if no (more) data can come, or if the forwarded output is not read.
  int output() const { return output_.full() ? -1 : output_pipe_.read_end.get(); }
  int errors() const { return errors_.full() ? -1 : errors_pipe_.read_end.get(); }
  bool ended() const { return !output_pipe_.read_end && !errors_pipe_.read_end; }
  /// Read the available data.
  void read_output() {
    read_lines(output_pipe_.read_end, output_lines_, [this](std::string_view line) { on_line(line, false); });
  }
  void read_errors() {
    read_lines(errors_pipe_.read_end, error_lines_, [this](std::string_view line) { on_line(line, true); });
  }

  /// Returns and clears the rank's held error line, without its "tessera: ".
  std::optional<std::string> release_error() { return std::exchange(held_, std::nullopt); }
  /// Returns and clears the held lines of other programs, unchanged.
  std::string release_others() { return std::exchange(others_, {}); }
  const std::string& others() const { return others_; }
  bool has_error() const { return held_.has_value(); }
  /// Why the log is incomplete; "" if it is complete.
  const std::string& log_problem() const { return log_problem_; }
  const std::string& last_error_line() const { return last_error_line_; }

 private:
  void on_line(std::string_view line, bool is_error);
  void pass_on(std::string_view line, bool is_error) const;
  void log(std::string_view line);

  const LaunchSpec& plan_;
  const bool by_prefix_;
  const int rank_;  ///< -1: under a prefix
  Outlet &output_, &errors_;
  Pipe output_pipe_;
  Pipe errors_pipe_;
  LineSplitter output_lines_;
  LineSplitter error_lines_;
  std::string last_error_line_;
  /// Of this tool's ranks: the last line that begins with "tessera: ". Under a prefix the first such line, and foreign
  /// lines: several ranks and the program that started them write to one pipe.
  std::optional<std::string> held_;
  std::string others_;
  std::string log_file_;  ///< "": none
  base::UniqueFd log_;
  std::string log_problem_;
};

}  // namespace tessera::tools
