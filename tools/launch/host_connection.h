// Both sides of a connection of `tessera run --hosts`: ssh on the launcher's host, and the far side, which starts the
// ranks of its host.
//
// The launcher runs `tessera run --as-host` through ssh. Standard input carries its lines: the order (one JSON object),
// then "alive", "fail" (a rank elsewhere has failed) and "signal N". Its end, or silence, ends the ranks. Standard
// output carries the answers: "c hello VERSION HOST", "c master ADDRESS:PORT", "c failed WEIGHT RANK", and lines of
// ranks as "o RANK TEXT" and "e RANK TEXT". Standard error has the last line that `tessera run` prints.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/launch/process.h"
#include "tools/launch/rank_output.h"

namespace tessera::tools {

class HostConnection {
 public:
  /// Starts `command`, which ends with this process. Throws InvalidUsage, SystemError.
  HostConnection(std::string host, ProcessSpec command, Pipe input = make_pipe());
  ~HostConnection();

  const std::string& host() const { return host_; }
  /// Sends a line as soon as the connection accepts it.
  void send(std::string_view line) {
    if (lifeline_) input_.write(std::string(line) + "\n");
  }
  void flush() { input_.flush(); }
  /// Ends the far side by the end of its input.
  void hang_up() { lifeline_.reset(); }
  void kill() const;

  /// Descriptors to poll; -1: none.
  int waiting() const { return lifeline_ ? input_.waiting() : -1; }
  int output() const { return output_.get(); }
  int errors() const { return errors_.get(); }
  /// Read what has arrived and call `line` for each line, at the end of the source also for the last.
  void read_output(const std::function<void(std::string_view line)>& line) { read(output_, output_lines_, line); }
  void read_errors(const std::function<void(std::string_view line)>& line) { read(errors_, error_lines_, line); }

  /// Notes whether the process has ended.
  void reap();
  /// Whether it has, and all that it printed was read. A process of ssh's that outlives it (a ProxyCommand) may hold
  /// the streams: after kToDrain without a line they are given up.
  bool ended();
  int status() const { return status_; }  ///< of waitpid

 private:
  static constexpr std::chrono::seconds kToDrain{2};
  void read(base::UniqueFd& source, LineSplitter& lines, const std::function<void(std::string_view)>& line) {
    heard_ = std::chrono::steady_clock::now();
    read_lines(source, lines, line);
  }

  const std::string host_;
  base::UniqueFd lifeline_;
  Outlet input_;
  base::UniqueFd output_;
  base::UniqueFd errors_;
  LineSplitter output_lines_;
  LineSplitter error_lines_;
  pid_t pid_ = -1;
  bool running_ = true;
  int status_ = 0;
  std::chrono::steady_clock::time_point heard_;  ///< of the streams or the end
};

/// The command that starts the far side of a subcommand ("run") on a host by keys alone; `ssh`: program and options,
/// `tessera`: the path there.
std::vector<std::string> far_side_command(std::vector<std::string> ssh, const std::string& host,
                                          const std::string& tessera, const std::string& subcommand);

/// What a process printed until it ended.
struct Captured {
  std::vector<std::string> output;
  std::string last_error;  ///< its last line on standard error, without "tessera: "
  bool ended = false;      ///< in time; otherwise it was killed
  int status = 0;          ///< of waitpid
};
/// Runs a process that reads nothing. Throws as HostConnection.
Captured capture(const ProcessSpec& process, std::chrono::seconds patience);

/// What ssh connects to for this name: its configuration may have another.
std::string name_in_network(std::vector<std::string> ssh, const std::string& host);

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
