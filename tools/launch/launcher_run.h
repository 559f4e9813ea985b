// The launcher's state: launcher.cpp starts and ends the ranks, launcher_report.cpp reports the outcome.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/cli/outlet.h"
#include "tools/launch/launcher.h"
#include "tools/launch/process.h"
#include "tools/launch/rank_output.h"
#include "tools/launch/rank_watch.h"
#include "tools/launch/signals.h"

namespace tessera::tools {

class Launcher {
 public:
  explicit Launcher(const LaunchSpec& plan);
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Rank {
    pid_t pid = -1;
    bool running = false;
    bool told_to_stop = false;  ///< by the launcher: its end is not the cause
    int status = 0;             ///< of waitpid
    std::optional<RankOutput> output;
    bool failed() const { return !running && status != 0 && !told_to_stop; }
  };
  struct Verdict {
    int code = 0;
    std::string cause;  ///< set if the code is not 0
  };
  enum class Stage { running, grace, terminating, killing };

  void start(int child, const std::string& token);
  bool by_prefix() const { return !plan_.prefix.empty(); }
  std::vector<std::string> command() const;
  std::vector<std::pair<std::string, std::string>> variables(int rank, const std::string& token) const;
  std::vector<int> cores_of(int rank) const;
  void pump(std::chrono::milliseconds longest);
  void read_rest();
  bool write_rest(std::chrono::milliseconds patience);
  void reap();
  void begin_grace();
  void on_interrupt(int signal);
  void signal_running(int signal);
  void escalate();
  void sweep();
  bool any_running() const;
  int report();
  Verdict verdict();
  Verdict verdict_under_prefix();
  std::string cause_text(Rank& rank, int number);

  const LaunchSpec& plan_;
  SignalPipe signals_;
  const std::string run_id_;
  OrphanReaper guardian_;
  Outlet output_;
  Outlet errors_;
  std::optional<RankWatch> watch_;  ///< under a prefix
  std::vector<Rank> ranks_;
  int first_failed_ = -1;
  bool error_came_first_ = false;  ///< under a prefix: an error line came before a rank was lost
  int interrupted_by_ = 0;
  Clock::time_point failed_at_{};
  Stage stage_ = Stage::running;
};

}  // namespace tessera::tools
