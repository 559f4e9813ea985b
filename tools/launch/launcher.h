// The local launcher: starts ranks as processes on this host, forwards their output, and leaves no process behind.
//
// A rank is a child process that gets its rank and world from the environment (TESSERA_RANK, TESSERA_WORLD_SIZE,
// TESSERA_LOCAL_RANK, TESSERA_LOCAL_WORLD_SIZE, TESSERA_RUN_ID, TESSERA_TOKEN). When a rank dies, the others have
// `grace` to detect and report it, then receive SIGTERM (and SIGCONT, so that a stopped rank handles it), then SIGKILL;
// a rank that is stopped by a signal gets no grace once all others have ended. When the launcher itself dies, even by
// SIGKILL, the ranks and all processes that they started are killed.
//
// Ranks of some backends can only be started by their vendor's program. Then that program is the child, under the same
// supervision, and sets the ranks' numbers.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/cli/progress_line.h"

namespace tessera::tools {

/// Exit code of a rank of the tool that another rank's failure stopped, so that the launcher can name the first cause.
inline constexpr int kOtherRankFailed = 3;

/// In the directory of the flight recorder: the first cause of a failure.
inline constexpr const char* kFirstCause = "first-cause.txt";

class HostControl;

/// What a launcher on another host decides for the ranks of this one, if it starts ranks on several
/// (host_connection.h).
struct HostPart {
  int first_rank = 0;  ///< global rank of the first one here
  int world_size = 1;
  std::string run_id;
  std::string token;
  HostControl* control = nullptr;  ///< not null: its lines
};

struct LaunchSpec {
  int ranks = 1;
  std::vector<std::string> command;  ///< the program (looked up in PATH) and its arguments
  /// Command that starts the ranks, with "{ranks}" for their number; empty: the launcher starts them. The command binds
  /// the ranks to cores and merges their output: `bind_to_cores` and `tag` have no effect then, and `log_dir` gets one
  /// file.
  std::vector<std::string> prefix;
  std::vector<std::pair<std::string, std::string>> environment;  ///< for the ranks, beside what the launcher sets
  bool tag = false;                                              ///< prefix each line with "[rank] "
  bool bind_to_cores = false;  ///< each rank to its equal share of the cores; more ranks than cores share them
  bool own_program = false;    ///< the ranks are this tool: their errors are reported once, the first cause last
  std::optional<std::filesystem::path> log_dir;  ///< each rank's lines also go to DIR/rank-R.log
  /// Called with a line of a rank's standard output, without the newline, which then goes nowhere else; under a
  /// prefix, the lines of all ranks have rank -1.
  std::function<void(int rank, std::string_view line)> on_output;
  std::optional<HostPart> host;  ///< the ranks are a part of a world, and standard output goes to its launcher
  int global_rank(int local) const { return local + (host ? host->first_rank : 0); }
  /// Shows lines of the ranks that begin with kProgressMark, which go nowhere else. Null: none do.
  ProgressLine* progress = nullptr;
  std::string failure_note;  ///< printed before the first cause, if the work failed; "": none
  std::string failure_file;  ///< gets the first cause, if the work failed; an older one is removed. "": none
  std::chrono::milliseconds grace{2000};
  std::chrono::milliseconds kill_after{1000};  ///< between SIGTERM and SIGKILL
};

/// Runs the ranks until all have ended. Returns the exit code of the run: 0, 1 (a rank failed, or a signal stopped the
/// run) or 2 (wrong usage in the rank that failed first). If it is not 0, the last line on standard error names the
/// first cause. Throws InvalidUsage if the program can't be started, SystemError if the system refuses. Call it on the
/// main thread, one call at a time.
int launch(const LaunchSpec& plan);

}  // namespace tessera::tools
