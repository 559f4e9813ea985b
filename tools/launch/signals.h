// Signals as bytes of a pipe, for as long as an object lives.
#pragma once

#include <signal.h>

#include <array>

#include "tools/launch/process.h"

namespace tessera::tools {

/// Turns SIGCHLD, SIGINT, SIGTERM and SIGHUP into readable bytes. One at a time; the former handlers come back with its
/// end.
class SignalPipe {
 public:
  SignalPipe();
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;
  /// Becomes readable when a signal has come.
  int descriptor() const { return pipe_.read_end.get(); }
  /// Takes what has come; 0, or the last SIGINT, SIGTERM or SIGHUP.
  int take();

 private:
  static constexpr std::array<int, 4> kSignals = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
  Pipe pipe_;
  std::array<struct sigaction, kSignals.size()> former_{};
};

/// From here on, until a SignalPipe takes over, SIGINT, SIGTERM and SIGHUP end this process with the line that the
/// launcher would say, and code 1.
void say_what_stops_us();

/// "SIGKILL" for 9.
const char* signal_name(int signal);

}  // namespace tessera::tools
