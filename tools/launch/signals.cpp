#include "tools/launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::tools {
namespace {

// A signal handler can only access globals.
std::atomic<int> signal_target{-1};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

void write_to_pipe(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t written = ::write(signal_target.load(std::memory_order_relaxed), &byte, 1);
  errno = saved;
}

/// Signal-safe: no stdio, no allocation.
void on_early_signal(int signal) {
  char text[64] = "tessera: stopped by signal ";
  std::size_t length = std::strlen(text);
  if (signal >= 10) text[length++] = static_cast<char>('0' + signal / 10);
  text[length++] = static_cast<char>('0' + signal % 10);
  for (const char* part : {" (", signal_name(signal), ")\n"})
    for (; *part != '\0'; ++part) text[length++] = *part;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, length);
  ::_exit(1);
}

}  // namespace

void say_what_stops_us() {
  struct sigaction action {};
  action.sa_handler = on_early_signal;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction former {};
    if (::sigaction(signal, nullptr, &former) == 0 && former.sa_handler == SIG_DFL)
      ::sigaction(signal, &action, nullptr);
  }
}

SignalPipe::SignalPipe() : pipe_(make_pipe()) {
  for (const int end : {pipe_.read_end.get(), pipe_.write_end.get()}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  signal_target = pipe_.write_end.get();
  struct sigaction action {};
  action.sa_handler = write_to_pipe;
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &former_[i]);
}

SignalPipe::~SignalPipe() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &former_[i], nullptr);
  signal_target = -1;
}

int SignalPipe::next_signal() {
  unsigned char bytes[64];
  int last = 0;
  for (ssize_t got = 0; (got = ::read(pipe_.read_end.get(), bytes, sizeof bytes)) > 0;)
    for (ssize_t i = 0; i < got; ++i)
      if (bytes[i] != SIGCHLD) last = bytes[i];
  return last;
}

const char* signal_name(int signal) {
  static constexpr std::pair<int, const char*> kNames[] = {
      {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGHUP, "SIGHUP"},
      {SIGILL, "SIGILL"},   {SIGINT, "SIGINT"},   {SIGKILL, "SIGKILL"}, {SIGPIPE, "SIGPIPE"},
      {SIGQUIT, "SIGQUIT"}, {SIGSEGV, "SIGSEGV"}, {SIGTERM, "SIGTERM"}};
  for (const auto& [number, name] : kNames)
    if (number == signal) return name;
  return "signal";
}

}  // namespace tessera::tools
