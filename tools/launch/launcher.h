// The local launcher: starts ranks as processes on this host, passes on what they print, and leaves none behind.
//
// A rank is a child process that learns its place from the environment (TESSERA_RANK, TESSERA_WORLD_SIZE,
// TESSERA_LOCAL_RANK, TESSERA_LOCAL_WORLD_SIZE, TESSERA_RUN_ID, TESSERA_TOKEN). When one dies, the others get `grace`
// to notice and say so, then SIGTERM (and SIGCONT, so that a stopped one hears it), then SIGKILL. When the launcher
// itself dies, even by SIGKILL, so do the ranks and whatever they started.
//
// Ranks of some backends can only be started by a program of its vendor: that one is then the child, under the same
// watch, and the ranks learn their place from it.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::tools {

/// A rank of the tool ends with this code when what stopped it was another rank, so that the launcher can name the
/// first cause.
inline constexpr int kOtherRankFailed = 3;

/// Gets a rank's lines of standard output, without the newline; under a prefix the lines of all as those of rank -1.
using LineHandler = std::function<void(int rank, std::string_view line)>;

struct LaunchSpec {
  int ranks = 1;
  std::vector<std::string> command;  ///< the program (looked up in PATH) and its arguments
  /// What starts the ranks instead of us, with "{ranks}" for their number; empty: we do. It binds them as it likes, and
  /// their output comes as one: `bind_to_cores` and `tag` mean nothing then, and `log_dir` gets one file.
  std::vector<std::string> prefix;
  std::vector<std::pair<std::string, std::string>> environment;  ///< for the ranks, beside what the launcher sets
  bool tag = false;                                              ///< prefix each line with "[rank] "
  bool bind_to_cores = false;  ///< each rank to its equal share of the cores; more ranks than cores share them
  bool own_program = false;    ///< the ranks are this tool: errors of theirs are reported once, the first cause last
  std::optional<std::filesystem::path> log_dir;  ///< each rank's lines also go to DIR/rank-R.log
  LineHandler on_output;                         ///< instead of standard output
  std::chrono::milliseconds grace{2000};
  std::chrono::milliseconds kill_after{1000};  ///< between SIGTERM and SIGKILL
};

/// Runs the ranks to their end. Returns the exit code of the whole: 0, 1 (a rank failed or a signal stopped it) or 2
/// (the rank that failed first had wrong usage); where it isn't 0, the last line on standard error names the first
/// cause. Throws InvalidUsage where the program can't be started, SystemError where the system refuses. Called by the
/// main thread, once at a time.
int launch(const LaunchSpec& plan);

}  // namespace tessera::tools
