// The far side of `tessera run --hosts`: starts the ranks of this host for a launcher on another one.
//
// The launcher runs `tessera run --as-host` through ssh. Standard input carries its lines: the order (one JSON object),
// then "alive", "fail" (a rank elsewhere has failed) and "signal N". Its end, or silence, ends the ranks. Standard
// output carries the answers: "c hello VERSION HOST", "c master ADDRESS:PORT", "c failed WEIGHT RANK", and lines of
// ranks as "o RANK TEXT" and "e RANK TEXT". Standard error has the last line that `tessera run` prints.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "tools/launch/rank_output.h"

namespace tessera::tools {

/// How often the launcher sends "alive", and after how much silence the ranks are ended.
inline constexpr std::chrono::seconds kHostHeartbeat{5};
inline constexpr std::chrono::seconds kHostSilence{30};

/// The launcher's lines.
class HostControl {
 public:
  /// Waits for the next line. Empty: the launcher has gone, or sent nothing for so long.
  std::optional<std::string> next_line(std::chrono::seconds silence = kHostSilence);
  /// Descriptor to poll; -1 after its end.
  int descriptor() const { return ended_ ? -1 : 0; }

  static constexpr int kFail = -1;
  /// Consumes what has arrived: a signal, kFail or 0. After the end, or too long a silence, it returns SIGHUP once.
  int next();

 private:
  void read(int patience);

  LineSplitter splitter_;
  std::deque<std::string> lines_;
  std::chrono::steady_clock::time_point heard_ = std::chrono::steady_clock::now();
  bool ended_ = false;
  bool reported_ = false;
};

/// Runs the far side; returns the exit code. Throws InvalidUsage, SystemError.
int run_as_host();

}  // namespace tessera::tools
