// What one rank prints: read from its pipes, cut into lines and passed on.
#pragma once

#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tools/lines.h"
#include "tools/process.h"

namespace tessera::tools {

struct RankOutputPlan {
  int rank = 0;
  bool tag = false;          ///< "[rank] " before each line
  bool hold_errors = false;  ///< keep the last line that begins with "tessera: " until take_error()
  bool hold_first = false;  ///< ... the first such line instead, and what isn't ours until take_others(): several ranks
                            ///< and the program that started them write here
  bool capture = false;     ///< standard output goes through us too; else it is inherited
  std::string log_file;     ///< empty: none
  std::function<void(int rank, std::string_view line)> on_output;  ///< instead of standard output
};

class RankOutput {
 public:
  /// Throws InvalidUsage where the log can't be written.
  explicit RankOutput(RankOutputPlan plan);

  /// What the rank writes to; closed by detach() in this process.
  int child_output() const { return output_pipe_.write_end.get(); }
  int child_errors() const { return errors_pipe_.write_end.get(); }
  void detach();

  /// What to poll; -1 where there is nothing (more) to read.
  int output() const { return output_pipe_.read_end.get(); }
  int errors() const { return errors_pipe_.read_end.get(); }
  /// Reads what has come. False when that source has ended.
  bool read_output() { return read(output_pipe_.read_end, output_lines_, false); }
  bool read_errors() { return read(errors_pipe_.read_end, error_lines_, true); }

  /// The rank's held error line without its "tessera: ", if there is one; it is then forgotten.
  std::optional<std::string> take_error();
  /// What was held and is not ours, as it came; it is then forgotten.
  std::string take_others() { return std::exchange(others_, {}); }
  const std::string& last_error_line() const { return last_error_line_; }

 private:
  bool read(Descriptor& source, LineSplitter& lines, bool is_error);
  void on_line(std::string_view line, bool is_error);
  void pass_on(std::string_view line, bool is_error) const;

  RankOutputPlan plan_;
  Pipe output_pipe_;
  Pipe errors_pipe_;
  LineSplitter output_lines_;
  LineSplitter error_lines_;
  std::string last_error_line_;
  std::optional<std::string> held_;
  std::string others_;
  std::ofstream log_;
};

}  // namespace tessera::tools
