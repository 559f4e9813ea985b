#include "tessera/base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

namespace tessera::base {
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

}  // namespace tessera::base
