#include "tools/doctor/checks.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <thread>

#include "tessera/base/cores.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/registry.h"
#include "tools/cli/output.h"
#include "tools/launch/host_connection.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Findings = std::vector<Finding>;

constexpr double kGiB = 1024.0 * 1024 * 1024;

void check_cores(Findings& all) {
  const int online = static_cast<int>(std::thread::hardware_concurrency());
  std::error_code ignored;
  int nodes = 0;
  for (const auto& entry : fs::directory_iterator("/sys/devices/system/node", ignored))
    if (entry.path().filename().string().starts_with("node")) ++nodes;
  const std::string found =
      fmt::format("{} of {}, {} NUMA node{}", base::usable_cores(), online, std::max(nodes, 1), nodes > 1 ? "s" : "");
  if (const auto quota = base::cpu_quota(); quota && *quota < online)
    all.push_back({"note", "cores", fmt::format("{}: a cgroup allows the time of {:.2g}", found, *quota),
                   "threads are chosen for that; raise the quota (docker --cpus, limits.cpu) if more are meant"});
  else if (nodes > 1)
    all.push_back({"note", "cores", found, "give --bind core to tessera run, so that ranks keep to their memory"});
  else
    all.push_back({"ok", "cores", found});
  double load = 0;
  if (std::ifstream("/proc/loadavg") >> load && load > online)
    all.push_back({"warning", "load", fmt::format("a load average of {:.1f} on {} cores", load, online),
                   "other programs take the cores' time: measure on a quiet host"});
  std::string governor;
  if (std::ifstream("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") >> governor && governor == "powersave")
    all.push_back({"note", "clock rate", "the governor is powersave", "cpupower frequency-set -g performance"});
}

double available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name; file.ignore(256, '\n'))
    if (double kib = 0; name == "MemAvailable:" && file >> kib) return kib * 1024;
  return 0;
}

void check_memory(Findings& all) {
  const double bytes = available_memory();
  if (bytes < kGiB)
    all.push_back(
        {"warning", "memory", human_bytes(bytes) + " are available", "end other programs, or use more hosts"});
  else
    all.push_back({"ok", "memory", human_bytes(bytes) + " are available"});
  struct statvfs shared {};
  const bool there = ::statvfs("/dev/shm", &shared) == 0;
  const double free = there ? static_cast<double>(shared.f_bavail) * static_cast<double>(shared.f_frsize) : 0;
  const std::string use = "mpi, ucx and nccl share memory there";
  if (!there || ::access("/dev/shm", W_OK) != 0)
    all.push_back({"warning", "/dev/shm", "it can't be written; " + use, "mount -t tmpfs tmpfs /dev/shm"});
  else if (free < kGiB / 4)
    all.push_back({"warning", "/dev/shm", human_bytes(free) + " are free; " + use,
                   "remove what is left in it, or make it larger: docker --shm-size 1g, or in Kubernetes an emptyDir "
                   "of medium Memory"});
  else
    all.push_back({"ok", "/dev/shm", human_bytes(free) + " are free"});
  struct statvfs temporary {};
  if (::access("/tmp", W_OK | X_OK) != 0 || ::statvfs("/tmp", &temporary) != 0 || temporary.f_bavail == 0) {
    const bool other = ::access("/tmp", W_OK | X_OK) != 0 && free > 0 && ::access("/dev/shm", W_OK) == 0;
    all.push_back(
        {other ? "warning" : "error", "/tmp",
         "it can't be written; ranks of a host meet by a file there" + std::string(other ? ", or in /dev/shm" : ""),
         "make it writable (mode 1777), free space in it, or start ranks with TESSERA_MASTER and TESSERA_TOKEN"});
  }
}

rlim_t limit_of(int resource) {
  rlimit limit{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
  return limit.rlim_cur;
}

void check_limits(Findings& all) {
  constexpr rlim_t kFiles = 1024, kLocked = rlim_t{64} << 20U;
  const rlim_t files = limit_of(RLIMIT_NOFILE), locked = limit_of(RLIMIT_MEMLOCK), space = limit_of(RLIMIT_AS);
  if (files < kFiles)
    all.push_back({"warning", "open files", fmt::format("a process may open {}", files),
                   "ulimit -n 4096: over tcp a rank needs about one for each other rank"});
  else
    all.push_back({"ok", "open files", fmt::format("a process may open {}", files)});
  std::error_code ignored;
  const bool rdma = !fs::is_empty("/sys/class/infiniband", ignored) && !ignored;
  if (locked < kLocked && rdma)
    all.push_back({"warning", "locked memory",
                   human_bytes(static_cast<double>(locked)) + " at most, and RDMA needs more",
                   "ulimit -l unlimited, for all logins: memlock in /etc/security/limits.conf"});
  if (space != RLIM_INFINITY)
    all.push_back({"note", "address space", human_bytes(static_cast<double>(space)) + " at most",
                   "ulimit -v unlimited, unless the limit is meant"});
}

/// Whether one child of this process can read another's memory, as ranks of one launcher do.
bool siblings_read_each_other() {
  static const int kSecret = 4711;
  const pid_t owner = ::_Fork();
  if (owner == 0) {
    ::sleep(5);  // until it is killed
    ::_exit(0);
  }
  const pid_t reader = ::_Fork();
  if (reader == 0) {
    int seen = 0;
    iovec to{&seen, sizeof seen}, from{const_cast<int*>(&kSecret), sizeof kSecret};
    ::_exit(::process_vm_readv(owner, &to, 1, &from, 1, 0) == sizeof seen && seen == kSecret ? 0 : 1);
  }
  int status = 1;
  if (reader > 0) ::waitpid(reader, &status, 0);
  if (owner > 0) {
    ::kill(owner, SIGKILL);
    ::waitpid(owner, nullptr, 0);
  }
  return status == 0;
}

void check_cross_memory(Findings& all) {
  if (siblings_read_each_other()) {
    all.push_back({"ok", "memory reads", "ranks of this host can read each other's memory"});
    return;
  }
  int scope = 0;
  const bool limited = std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope && scope > 0;
  all.push_back({"warning", "memory reads",
                 "ranks of this host can't read each other's memory, so large messages are copied twice" +
                     (limited ? fmt::format(" (ptrace_scope is {})", scope) : ""),
                 limited ? "sysctl kernel.yama.ptrace_scope=0"
                         : "in a container: docker --cap-add SYS_PTRACE, or a seccomp profile that allows "
                           "process_vm_readv"});
}

/// Interfaces that are up and have an address, without loopback.
std::set<std::string> connected_interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw base::system_error("can't list the network interfaces");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::set<std::string> names;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    const bool address =
        one->ifa_addr != nullptr && (one->ifa_addr->sa_family == AF_INET || one->ifa_addr->sa_family == AF_INET6);
    if (address && (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0) names.insert(one->ifa_name);
  }
  return names;
}

void check_network(Findings& all, bool several) {
  if (const std::string problem = comm::loopback_problem("this host"); !problem.empty())
    all.push_back({"error", "loopback", problem, "ip link set lo up"});
  const std::set<std::string> names = connected_interfaces();
  std::vector<std::string> bridges;
  for (const std::string& name : names)
    if (fs::exists("/sys/class/net/" + name + "/bridge")) bridges.push_back(name);
  if (names.empty())
    all.push_back({several ? "error" : "note", "interfaces", "no interface but loopback has an address",
                   "ranks reach this host alone; ip address add ADDRESS/BITS dev NAME"});
  else if (!bridges.empty() && bridges.size() < names.size())
    all.push_back({"note", "interfaces", fmt::format("{}, with bridges of this host's own", joined_by(names, ", ")),
                   fmt::format("TESSERA_IFNAME=^{} if another host can't be reached", joined_by(bridges, ","))});
  else
    all.push_back({"ok", "interfaces", joined_by(names, ", ")});
}

void check_name(Findings& all, bool several) {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const int error = ::getaddrinfo(name, nullptr, &hints, &first);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(error == 0 ? first : nullptr, &::freeaddrinfo);
  const std::string remedy = fmt::format("write the host's address before {} in /etc/hosts", name);
  if (error != 0) {
    all.push_back({"note", "name", fmt::format("{} has no address: {}", name, ::gai_strerror(error)), remedy});
    return;
  }
  char address[NI_MAXHOST] = {};
  ::getnameinfo(first->ai_addr, first->ai_addrlen, address, sizeof address, nullptr, 0, NI_NUMERICHOST);
  if (comm::is_loopback(address))
    all.push_back(
        {several ? "warning" : "note", "name",
         fmt::format("{} leads to the loopback address {} here, which other hosts can't reach", name, address),
         remedy + ", or give an address as TESSERA_MASTER (tessera run: --address)"});
  else
    all.push_back({"ok", "name", fmt::format("{} is {}", name, address)});
}

void check_clock(Findings& all) {
  timex state{};
  if (::adjtimex(&state) == TIME_ERROR)
    all.push_back({"note", "time server", "no server sets the clock",
                   "install chrony, where certificates or logs of several hosts "
                   "are compared by time"});
}

/// Those of ranks' own programs show in the worlds of check_backends().
void check_environment(Findings& all) {
  try {
    check_variables();
  } catch (const base::InvalidUsage& error) {
    all.push_back({"error", "variables", error.what(), "correct it, or unset the variable"});
  }
}

/// Runs a world of two ranks on each backend that this program has.
void check_backends(Findings& all) {
  const std::string self = fs::read_symlink("/proc/self/exe");
  for (const comm::BackendState& backend : comm::list_backends()) {
    const std::string subject = "backend " + backend.name;
    if (!backend.available) {
      all.push_back({"note", subject, "not available: " + backend.reason});
      continue;
    }
    if (backend.name == "nccl") {  // a device for each rank, which one host may not have
      all.push_back({"ok", subject, "available"});
      continue;
    }
    std::vector<std::string> alone = base::environment_with({});
    const std::vector<std::string> launchers = comm::rank_variables();
    std::erase_if(alone, [&](const std::string& entry) {
      const std::string name = entry.substr(0, entry.find('='));
      return name == "TESSERA_BACKEND" || name == "TESSERA_MASTER" ||
             std::ranges::find(launchers, name) != launchers.end();
    });
    const Captured run = capture({.command = {self, "bench", "all_reduce", "--backend", backend.name, "--ranks", "2",
                                              "-b", "1M", "-e", "1M", "-n", "3", "-w", "1", "--check"},
                                  .environment = alone},
                                 std::chrono::seconds(30));
    if (run.status == 0)
      all.push_back({"ok", subject, "two ranks sum 1 MiB"});
    else
      all.push_back({"error", subject,
                     run.ended ? "two ranks fail: " + run.last_error : "two ranks don't end within 30 s",
                     fmt::format("tessera bench all_reduce --backend {} --ranks 2", backend.name)});
  }
}

}  // namespace

nlohmann::ordered_json finding_json(const Finding& finding) {
  return {{"level", finding.level}, {"subject", finding.subject}, {"found", finding.found}, {"remedy", finding.remedy}};
}

Findings check_host(bool several) {
  Findings all;
  check_cores(all);
  check_memory(all);
  check_limits(all);
  check_cross_memory(all);
  check_network(all, several);
  check_name(all, several);
  check_clock(all);
  check_environment(all);
  check_backends(all);
  return all;
}

}  // namespace tessera::tools
