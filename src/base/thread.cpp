#include "tessera/base/thread.h"

#include <signal.h>

#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/fp_environment.h"

namespace tessera::base {

SignalBlock::SignalBlock() noexcept {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&all, fault);
  static_assert(sizeof(sigset_t) <= sizeof before_);
  ::pthread_sigmask(SIG_BLOCK, &all, reinterpret_cast<sigset_t*>(before_.data()));
}

SignalBlock::~SignalBlock() {
  ::pthread_sigmask(SIG_SETMASK, reinterpret_cast<const sigset_t*>(before_.data()), nullptr);
}

std::thread start_thread(std::function<void()> body) {
  const SignalBlock none;
  return start_program_thread([body = std::move(body)] {
    const FpEnvironment environment;
    body();
  });
}

std::thread start_program_thread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw SystemError(
        std::string("can't start a thread: ") + error.code().message() +
        "; raise the limit of processes and threads (ulimit -u, pids.max of the container), or start fewer "
        "ranks on this host");
  }
}

}  // namespace tessera::base
