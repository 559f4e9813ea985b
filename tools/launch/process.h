// Child processes of the launcher, the signals that it gets, and what killed processes leave behind.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <array>
#include <string>
#include <vector>

#include "tessera/base/file.h"

namespace tessera::tools {

struct Pipe {
  base::UniqueFd read_end;
  base::UniqueFd write_end;
};
/// Creates a pipe; both ends are closed on exec. Throws SystemError.
Pipe make_pipe();

struct ProcessSpec {
  std::vector<std::string> command;      ///< looked up in PATH
  std::vector<std::string> environment;  ///< NAME=value
  int input = -1;                        ///< its standard input; -1: see reads_input
  int output = -1;                       ///< its standard output; -1: inherited
  int errors = -1;                       ///< its standard error; -1: inherited
  std::vector<int> cores;                ///< empty: inherited
  bool reads_input = true;               ///< inherits standard input; else it reads nothing
  bool own_session = false;              ///< Ctrl-C in the terminal doesn't reach it
};

/// Starts a program that dies with this process. Throws InvalidUsage if there is no such program, else SystemError.
pid_t start_process(const ProcessSpec& plan);

/// Kills and reaps the children of this process except one. If it is a subreaper, those are also the processes that its
/// ended children have left running.
void kill_children(pid_t except);

/// Removes the rendezvous files of this user's dead processes, and the shared-memory segments that the MPI and UCX
/// libraries created under this user and that no process has open or mapped any more. Keeps all of them if their use
/// can't be determined: if a process of this user can't be inspected, or if there may be processes that are not visible
/// here. Throws nothing.
void remove_leftovers() noexcept;

/// Whether a signal has stopped the process, so that it does nothing before SIGCONT.
bool is_stopped(pid_t pid);

/// A helper process that outlives a launcher which dies unexpectedly, just long enough to kill every process with
/// `marker` in its environment, including the ranks' own children. It ends with the object.
class OrphanReaper {
 public:
  explicit OrphanReaper(const std::string& marker);
  ~OrphanReaper();
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  base::UniqueFd lifeline_;
};

/// Turns SIGCHLD, SIGINT, SIGTERM and SIGHUP into readable bytes. At most one at a time; the destructor restores the
/// former handlers.
class SignalPipe {
 public:
  SignalPipe();
  ~SignalPipe();
  /// Becomes readable when a signal has arrived.
  int descriptor() const { return pipe_.read_end.get(); }
  /// Consumes the signals that have arrived; returns 0, or the last SIGINT, SIGTERM or SIGHUP.
  int next_signal();

 private:
  static constexpr std::array<int, 4> kSignals = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
  Pipe pipe_;
  std::array<struct sigaction, kSignals.size()> former_{};
};

/// Until a SignalPipe exists, SIGINT, SIGTERM and SIGHUP end this process with the line that the launcher would print,
/// and code 1.
void say_what_stops_us();

/// "SIGKILL" for 9.
const char* signal_name(int signal);

}  // namespace tessera::tools
