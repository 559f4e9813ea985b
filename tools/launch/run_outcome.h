// The outcome of a run: its exit code and the first cause of its failure.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "tools/launch/launcher.h"
#include "tools/launch/rank_output.h"
#include "tools/launch/rank_watch.h"

namespace tessera::tools {

/// A process that the launcher started: a rank, or under a prefix the program that starts the ranks.
struct LaunchedProcess {
  pid_t pid = -1;
  bool running = false;
  bool stopped_by_launcher = false;  ///< its end is not the cause
  int status = 0;                    ///< of waitpid
  std::optional<RankOutput> output;
  bool failed() const { return !running && status != 0 && !stopped_by_launcher; }
};

/// How the processes of a run ended. The members outlive it.
struct RunEnd {
  const LaunchSpec& plan;
  std::vector<LaunchedProcess>& ranks;
  const RankWatch* watch = nullptr;  ///< under a prefix
  int first_failed = -1;             ///< of `ranks`
  int interrupted_by = 0;            ///< a signal
  bool error_came_first = false;     ///< under a prefix: an error line came before a rank was lost
  std::string never_started = {};  ///< under a prefix: why the launcher ended the prefix program, which started no rank
};

struct Verdict {
  int code = 0;         ///< of the run
  std::string cause;    ///< set if the code is not 0
  std::string warning;  ///< a line about a run that ended well; may be empty
};

/// Consumes the error line of the process that is the first cause.
Verdict verdict_of(const RunEnd& end);

}  // namespace tessera::tools
