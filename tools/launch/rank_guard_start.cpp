#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <functional>
#include <vector>

#include "tessera/base/device/module_loader.h"
#include "tools/launch/rank_watch.h"

namespace tessera::tools {
namespace {

// A signal handler can only access globals.
std::atomic<int> guards_connection{-1};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

/// SIGTERM: the launcher ends this rank because of another one.
void on_signal(int signal) {
  const char byte = signal == SIGABRT ? 'a' : 't';
  [[maybe_unused]] const ssize_t written = ::write(guards_connection.load(std::memory_order_relaxed), &byte, 1);
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void spawn(std::vector<std::string> arguments) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);  // the launcher waits until they are closed
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  char* none[] = {nullptr};  // so that this process is not mistaken for the rank
  pid_t pid = -1;
  ::posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), none);
  ::posix_spawn_file_actions_destroy(&actions);
}

}  // namespace

RankGuard::RankGuard(const comm::Launch& launch) {
  if (launch.size == 1 || launch.launcher == "tessera") return;
  const std::size_t job = std::hash<std::string>{}(launch.job + "/" + std::to_string(::geteuid()));
  const std::string name = "tessera-guard-" + std::to_string(job);
  const bool speaks_last = launch.launcher == "openmpi";
  // Launchers number the ranks of a host consecutively unless configured otherwise; in that case the guard lists too
  // many ranks.
  spawn({base::module_folder() + "/rank-guard", name, std::to_string(speaks_last ? ::getppid() : 0),
         std::to_string(launch.rank - launch.local_rank), std::to_string(launch.local_size)});
  // Blocks SIGTERM until it can be distinguished from a death.
  sigset_t terminated;
  sigset_t before;
  ::sigemptyset(&terminated);
  ::sigaddset(&terminated, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &terminated, &before);
  constexpr int kAttempts = 2000;  // 2 s on a busy machine; the rank also runs without a guard
  for (int i = 0; i < kAttempts && !connection_.connected(); ++i) {
    connection_ = LauncherConnection(name, std::to_string(launch.rank) + "\n");
    if (!connection_.connected()) ::usleep(1000);
  }
  if (connection_.connected()) {
    guards_connection = connection_.last();
    struct sigaction action {};
    action.sa_handler = on_signal;
    for (const int signal : {SIGTERM, SIGABRT}) ::sigaction(signal, &action, nullptr);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void RankGuard::end(int code) const { connection_.send(code == 0 ? "e" : "f"); }

}  // namespace tessera::tools
