// Threads of the library.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <thread>

#include "tessera/base/export.h"

namespace tessera::base {

/// While it exists, the calling thread takes no signals, and threads that it or a library starts inherit that: a
/// program's sigwait(), signalfd and handlers in its own threads then get all of them. Signals that report a fault of
/// the thread itself (SIGSEGV, SIGFPE, ...) are not blocked.
class TESSERA_API SignalBlock {
 public:
  SignalBlock() noexcept;
  ~SignalBlock();
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  std::array<std::uint64_t, 16> before_{};  ///< the thread's sigset_t
};

/// Starts a thread of the library: without signals (SignalBlock) and with the default FpEnvironment. Throws SystemError
/// if the system has no more threads.
TESSERA_API std::thread start_thread(std::function<void()> body);

/// Starts a thread for code of the program, which inherits the caller's signals and arithmetic. Throws as above.
TESSERA_API std::thread start_program_thread(std::function<void()> body);

}  // namespace tessera::base
