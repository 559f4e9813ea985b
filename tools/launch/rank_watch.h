// Maps processes to ranks and finds the one that ended first, if another program starts the ranks: the kernel reports
// only the end of a process's own children. The ranks connect to a Unix socket that is named in their environment: when
// they start (rank_start.cpp), and the tool's own ranks again when they begin, with a connection that stays open until
// they end.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/file.h"
#include "tessera/comm/launch.h"

namespace tessera::tools {

class RankWatch {
 public:
  /// `own_program`: ranks report their end, so a rank that doesn't was ended from outside. Throws SystemError.
  RankWatch(int ranks, bool own_program);
  /// The ranks' value of launch_socket_variable().
  const std::string& name() const { return name_; }
  /// Becomes readable when poll_events() has events to process.
  int descriptor() const { return events_.get(); }
  /// Processes all events so far.
  void poll_events();

  struct Lost {
    int rank = 0;
    std::optional<int> status;  ///< as of waitpid, if known
  };
  /// The first rank that ended without a report, or, if ranks don't report, with a code that isn't 0.
  const std::optional<Lost>& lost() const { return lost_; }
  /// True if a rank has reported that it ends with an error before any was lost: then a starter may have killed the
  /// lost one because of it.
  bool failed_first() const { return failed_first_; }
  /// The rank whose death another rank reports in `text` as "pid=N", as UCX writes it: UCX ends a process that reads
  /// the memory of a dead one, and the reader can end first.
  std::optional<Lost> named_in(const std::string& text) const;
  /// True if a rank has reported that it starts.
  bool any_started() const;
  /// True if all ranks are known, and those that have not ended are stopped by a signal.
  bool rest_is_stopped() const;
  /// True if all ranks have reported that they ended with code 0.
  bool all_done() const;

 private:
  struct Process {
    int rank = -1;
    base::UniqueFd handle;    ///< readable when the process has ended
    std::optional<int> code;  ///< as reported
    bool ended = false;
    std::optional<int> status;  ///< as of waitpid, if known
  };
  void accept_all();
  void watch(int fd, std::uint64_t mark);
  void on_connection(base::UniqueFd connection, pid_t pid);
  void on_report(pid_t pid, const std::string& text);
  void on_hangup(int fd);
  void on_end(pid_t pid);
  void on_lost(const Process& process) {
    if (!lost_ && process.rank >= 0) lost_ = Lost{.rank = process.rank, .status = process.status};
  }

  const int ranks_;
  const bool own_program_;
  const std::string name_;
  base::UniqueFd listener_;
  base::UniqueFd events_;
  std::map<pid_t, Process> processes_;
  std::map<int, std::pair<base::UniqueFd, pid_t>> connections_;  ///< of processes that have begun
  std::optional<Lost> lost_;
  bool failed_first_ = false;
};

/// A rank's connection to a process that must learn of its death in time. It consists of two sockets: when a process is
/// killed, the kernel closes its descriptors by number, some kernels upwards, some downwards, and may be interrupted in
/// between. One of the two is closed before the descriptor by which mpirun detects the death and starts to kill the
/// others.
class LauncherConnection {
 public:
  LauncherConnection() = default;
  /// Connects to the Unix socket with this path or abstract name and sends `first`. Not connected if no process
  /// listens.
  LauncherConnection(const std::string& name, std::string_view first);
  bool connected() const { return static_cast<bool>(sockets_.back()); }
  int last() const { return sockets_.back().get(); }
  void send(std::string_view text) const;

 private:
  std::array<base::UniqueFd, 2> sockets_;
};

/// A rank's connection to this tool's launcher above it, if there is one that requests reports: "end CODE\n".
LauncherConnection connect_to_launcher();

/// The connection of a rank that another launcher has started to the guard process, which reports the rank's death
/// (rank_guard.cpp), unless that sends "e", or "f" if it has failed and printed the cause. Not connected for a world of
/// one, or for ranks of this tool's launcher.
LauncherConnection connect_to_guard(const comm::Launch& launch);

}  // namespace tessera::tools
