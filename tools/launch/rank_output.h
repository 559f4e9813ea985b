// The output of one rank: read from its pipes, divided into lines and forwarded.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/file.h"
#include "tools/cli/outlet.h"
#include "tools/cli/progress_line.h"
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

struct RankOutputPlan {
  int rank = 0;
  bool tag = false;          ///< "[rank] " before each line
  bool hold_errors = false;  ///< keep the last line that begins with "tessera: " until release_error()
  bool hold_first = false;   ///< ... the first such line instead, and foreign lines until release_others(): several
                             ///< ranks and the program that started them write to this pipe
  bool capture = false;      ///< standard output is forwarded too; else it is inherited
  std::string log_file;      ///< empty: none
  std::function<void(int rank, std::string_view line)> on_output;  ///< instead of standard output
  Outlet* output = nullptr;                                        ///< standard output; outlives the rank
  Outlet* errors = nullptr;                                        ///< standard error; outlives the rank
  ProgressLine* progress = nullptr;                                ///< as LaunchSpec::progress; outlives the rank
};

class RankOutput {
 public:
  /// Throws InvalidUsage if the log can't be written.
  explicit RankOutput(RankOutputPlan plan);

  /// Write ends for the rank; detach() closes them in this process.
  int child_output() const { return output_pipe_.write_end.get(); }
  int child_errors() const { return errors_pipe_.write_end.get(); }
  void detach();

  /// Descriptors to poll; -1 if no (more) data can come, or if the forwarded output is not read.
  int output() const { return plan_.output->full() ? -1 : output_pipe_.read_end.get(); }
  int errors() const { return plan_.errors->full() ? -1 : errors_pipe_.read_end.get(); }
  bool ended() const { return !output_pipe_.read_end && !errors_pipe_.read_end; }
  /// Reads the available data. False after the end of the source.
  bool read_output() { return read(output_pipe_.read_end, output_lines_, false); }
  bool read_errors() { return read(errors_pipe_.read_end, error_lines_, true); }

  /// Returns and clears the rank's held error line, without its "tessera: ".
  std::optional<std::string> release_error();
  /// Returns and clears the held lines of other programs, unchanged.
  std::string release_others() { return std::exchange(others_, {}); }
  const std::string& others() const { return others_; }
  bool has_error() const { return held_.has_value(); }
  /// Why the log is incomplete; "" if it is complete.
  const std::string& log_problem() const { return log_problem_; }
  const std::string& last_error_line() const { return last_error_line_; }

 private:
  bool read(base::UniqueFd& source, LineSplitter& lines, bool is_error);
  void on_line(std::string_view line, bool is_error);
  void pass_on(std::string_view line, bool is_error) const;
  void log(std::string_view line);

  RankOutputPlan plan_;
  Pipe output_pipe_;
  Pipe errors_pipe_;
  LineSplitter output_lines_;
  LineSplitter error_lines_;
  std::string last_error_line_;
  std::optional<std::string> held_;
  std::string others_;
  base::UniqueFd log_;
  std::string log_problem_;
};

}  // namespace tessera::tools
