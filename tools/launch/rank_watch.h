// Which process is which rank, and which of them ended first, where another program starts the ranks: the kernel tells
// our own children's ends only. The ranks report at a Unix socket whose name they find in their environment: when they
// start (rank_start.cpp), and the tool's own ranks again when they begin, on a connection that stays until they end.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/launch.h"
#include "tools/launch/process.h"

namespace tessera::tools {

class RankWatch {
 public:
  /// `own_program`: ranks report their end, so one that doesn't was ended by something else. Throws SystemError.
  RankWatch(int ranks, bool own_program);
  /// For the environment of the ranks.
  std::pair<std::string, std::string> variable() const;
  /// ... where it has nothing to report to.
  static std::pair<std::string, std::string> no_variable();
  /// Becomes readable when take() has something to do.
  int descriptor() const { return events_.get(); }
  void take();

  struct Lost {
    int rank = 0;
    std::optional<int> status;  ///< as of waitpid, where it is known
  };
  /// The first rank that ended without having reported it, or, where ranks don't, with a code that isn't 0.
  const std::optional<Lost>& lost() const { return lost_; }
  /// The one of which another rank says that it was gone: UCX ends a process that reads the memory of one that dies,
  /// and such a reader can be gone first. `text` has "pid=N", as UCX writes it.
  std::optional<Lost> named_in(const std::string& text) const;
  /// All ranks have reported that they ended with code 0.
  bool all_done() const;

 private:
  struct Process {
    int rank = -1;
    Descriptor handle;        ///< readable when it has ended
    std::optional<int> code;  ///< as reported
    bool ended = false;
    std::optional<int> status;  ///< as of waitpid, where it is known
  };
  void accept_all();
  void watch(int fd, std::uint64_t mark);
  void on_connection(Descriptor connection, pid_t pid);
  void on_report(pid_t pid, const std::string& text);
  void on_hangup(int fd);
  void on_end(pid_t pid);
  void lose(const Process& process);

  const int ranks_;
  const bool own_program_;
  const std::string name_;
  Descriptor listener_;
  Descriptor events_;
  std::map<pid_t, Process> processes_;
  std::map<int, std::pair<Descriptor, pid_t>> connections_;  ///< of processes that have begun
  std::optional<Lost> lost_;
};

/// A rank's connection to somebody who must learn of its death in time. It is two: when a process is killed, the kernel
/// closes its descriptors by number, some kernels upwards, some downwards, and may be interrupted in between; one of
/// the two is closed before that by which mpirun learns of it, and begins to kill the others.
class LauncherConnection {
 public:
  LauncherConnection() = default;
  /// To the Unix socket with this abstract name; says `first`. Not connected where nobody listens.
  LauncherConnection(const std::string& name, std::string_view first);
  bool connected() const { return static_cast<bool>(sockets_.back()); }
  int last() const { return sockets_.back().get(); }
  void send(std::string_view text) const;

 private:
  std::array<Descriptor, 2> sockets_;
};

/// Of a rank to our own launcher above, if there is one that wants to know.
class RankReport {
 public:
  RankReport();
  /// This rank ends with this code.
  void end(int code) const { connection_.send("end " + std::to_string(code) + "\n"); }

 private:
  LauncherConnection connection_;
};

/// Of a rank that another launcher has started, to the process beside it that says that the rank died (rank_guard.cpp).
class RankGuard {
 public:
  /// None for a world of one, or for ranks of our own launcher.
  explicit RankGuard(const comm::Launch& launch);
  /// This rank ends by itself with this code, and has said why where it isn't 0.
  void end(int code) const;

 private:
  LauncherConnection connection_;
};

}  // namespace tessera::tools
