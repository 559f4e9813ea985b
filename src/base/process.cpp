#include "tessera/base/process.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <system_error>
#include <thread>
#include <utility>

#include "tessera/base/cores.h"
#include "tessera/base/error.h"
#include "tessera/base/fp_environment.h"
#include "tessera/base/thread.h"

namespace tessera::base {
namespace {

std::array<std::uint64_t, 2> random_bits() {
  std::array<std::uint64_t, 2> bits{};
  if (::getrandom(bits.data(), sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) throw system_error("getrandom");
  return bits;
}

}  // namespace

std::atomic<std::uint32_t> forks{0};

std::uint32_t count_forks() noexcept {
  [[maybe_unused]] static const int kCounts = ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  return forks_so_far();
}

ProcessIdentity this_process() {
  static const std::array<std::uint64_t, 2> kBits = random_bits();
  return {kBits[0], kBits[1], static_cast<std::uint64_t>(::getpid())};
}

namespace {

/// The quota of one cgroup, without those above it.
std::optional<double> quota_in(const std::string& folder, bool version_2) {
  double quota = 0;
  double period = 0;
  if (version_2) {
    std::ifstream file(folder + "/cpu.max");  // "max 100000" without a quota, which is no number
    file >> quota >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? std::optional(quota / period) : std::nullopt;
}

int within_quota(int cores) {
  const auto quota = cpu_quota();
  return std::max(1, quota ? std::min(cores, static_cast<int>(std::ceil(std::min(*quota, 1e6)))) : cores);
}

}  // namespace

std::optional<double> cpu_quota(const std::string& processes, const std::string& root) {
  std::optional<double> least;
  std::ifstream file(processes);
  for (std::string line; std::getline(file, line);) {  // "3:cpu,cpuacct:/path", or "0::/path" of version 2
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version_2 = controllers.empty();
    if (!version_2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    for (const std::string& mount :
         {version_2 ? root : root + "/" + controllers, version_2 ? root + "/unified" : root + "/cpu"}) {
      // A container that sees the host's path has its own cgroup at the mount itself, where the walk ends.
      for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
        if (const auto quota = quota_in(mount + path, version_2)) least = std::min(least.value_or(*quota), *quota);
        if (path.rfind('/') == std::string::npos) break;
      }
    }
  }
  return least;
}

int host_cores() { return within_quota(static_cast<int>(std::thread::hardware_concurrency())); }

int usable_cores() {
  cpu_set_t set;
  const bool known = ::sched_getaffinity(0, sizeof set, &set) == 0;
  return within_quota(known ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency()));
}

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
