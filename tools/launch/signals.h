// Signals as bytes of a pipe, during an object's lifetime.
#pragma once

#include <signal.h>

#include <array>

#include "tools/launch/process.h"

namespace tessera::tools {

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
