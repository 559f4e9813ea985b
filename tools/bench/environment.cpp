#include "tools/bench/environment.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/json/json_reader.h"
#include "tessera/comm/launch.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

/// The first line of a file; null if it can't be read or is empty.
ordered_json line_of(const fs::path& file) {
  std::ifstream in(file);
  std::string line;
  return std::getline(in, line) && !line.empty() ? ordered_json(line) : ordered_json();
}

/// The number at the beginning of a file; null if there is none, or a negative one, as in the speed of a virtual NIC.
ordered_json number_of(const fs::path& file) {
  std::ifstream in(file);
  double number = -1;
  if (!(in >> number) || number < 0) return {};
  return number == std::floor(number) ? ordered_json(static_cast<std::int64_t>(number)) : ordered_json(number);
}

ordered_json network_interfaces() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/sys/class/net", ignored)) names.insert(entry.path().filename());
  ordered_json nics = ordered_json::array();
  for (const std::string& name : names) {
    const fs::path folder = "/sys/class/net/" + name;
    const ordered_json state = line_of(folder / "operstate");
    if (name == "lo" || state == "down") continue;
    const std::string driver = fs::read_symlink(folder / "device/driver", ignored).filename();
    nics.push_back({{"name", name},
                    {"speed_mbit", number_of(folder / "speed")},
                    {"driver", driver.empty() ? ordered_json() : ordered_json(driver)},
                    {"mtu", number_of(folder / "mtu")}});
  }
  return nics;
}

/// Whether a variable tells a process its place in one launch rather than how to communicate.
bool is_of_launch(std::string_view name) {
  static const std::vector<std::string> ranks = comm::rank_variables();
  if (std::ranges::find(ranks, name) != ranks.end()) return true;
  constexpr std::array kNames = {"TESSERA_MASTER", "TESSERA_RUN_ID", "TESSERA_HOST_ID", "TESSERA_TOKEN",
                                 "TESSERA_LAUNCH_SOCKET"};
  constexpr std::array kPrefixes = {"OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "OMPI_MCA_ess_", "OMPI_MCA_pmix",
                                    "OMPI_UNIVERSE_",   "OMPI_APP_CTX_",  "OMPI_FIRST_",   "OMPI_NUM_APP_CTX",
                                    "OMPI_FILE_",       "OMPI_COMMAND",   "OMPI_ARGV",     "OMPI_MCA_initial_wdir"};
  return std::ranges::find(kNames, name) != kNames.end() ||
         std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

/// Of Tessera and the libraries below it. The values of secrets are left out.
ordered_json variables() {
  constexpr std::array kPrefixes = {"TESSERA_", "UCX_", "OMPI_", "I_MPI_", "MPICH_", "NCCL_"};
  constexpr std::array kSecrets = {"TOKEN", "SECRET", "PASSWORD"};
  std::map<std::string, std::string> found;
  for (const std::string& entry : base::environment_with({})) {
    const std::size_t equals = std::min(entry.find('='), entry.size());
    const std::string name = entry.substr(0, equals);
    if (std::ranges::none_of(kPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); })) continue;
    if (is_of_launch(name) || equals + 1 >= entry.size()) continue;  // an empty value is none
    const bool secret = std::ranges::any_of(kSecrets, [&](std::string_view word) { return name.ends_with(word); });
    found[name] = secret ? "(secret)" : entry.substr(equals + 1);
  }
  return found.empty() ? ordered_json::object() : ordered_json(found);
}

struct HostKey {
  std::string name;
  std::string key;  ///< containers may share a name, and namespaces of one host have other interfaces
};

HostKey this_host() {
  utsname system{};
  ::uname(&system);
  std::error_code ignored;
  return {system.nodename, std::string(system.nodename) + fs::read_symlink("/proc/self/ns/net", ignored).string() +
                               line_of("/proc/sys/kernel/random/boot_id").dump()};
}

ordered_json describe_host() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  struct sysinfo memory {};
  ::sysinfo(&memory);
  utsname system{};
  ::uname(&system);
  return {{"name", this_host().name},
          {"processor", processor_in(cpuinfo)},
          {"cores", ::sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_bytes", static_cast<std::uint64_t>(memory.totalram) * memory.mem_unit},
          {"kernel", std::string(system.release) + " " + system.machine},
          {"governor", line_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")},
          {"load", number_of("/proc/loadavg")},
          {"nics", network_interfaces()},
          {"variables", variables()}};
}

std::vector<int> nodes_of(const std::vector<int>& cores) {
  std::set<int> nodes;
  std::error_code ignored;
  for (const int core : cores)
    for (const auto& entry : fs::directory_iterator(fmt::format("/sys/devices/system/cpu/cpu{}", core), ignored)) {
      const std::string name = entry.path().filename();
      if (name.starts_with("node") && name.size() > 4 && std::isdigit(static_cast<unsigned char>(name[4])) != 0)
        nodes.insert(std::stoi(name.substr(4)));
    }
  return {nodes.begin(), nodes.end()};
}

/// A function of a library; null if it has none of this name.
template <class Function>
Function* function_of(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

/// The version that a loaded library tells; "" if it doesn't.
std::string version_of(const std::string& kind, void* library) {
  if (kind == "libucp") {
    const auto version = function_of<const char*()>(library, "ucp_get_version_string");
    return version == nullptr ? "" : version();
  }
  if (kind.starts_with("libmpi")) {
    constexpr std::size_t kLongest = std::size_t{16} << 10;  // MPICH's MPI_MAX_LIBRARY_VERSION_STRING is 8192
    const auto version = function_of<int(char*, int*)>(library, "MPI_Get_library_version");
    std::string text(kLongest, '\0');
    int length = 0;
    if (version == nullptr || version(text.data(), &length) != 0) return "";
    text.resize(std::min(text.find_first_of(std::string_view(",\n\0", 3)), static_cast<std::size_t>(length)));
    return text;
  }
  if (kind == "libnccl") {
    const auto version = function_of<int(int*)>(library, "ncclGetVersion");
    int number = 0;
    if (version == nullptr || version(&number) != 0) return "";
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  }
  const auto version = function_of<std::uint32_t()>(library, "fi_version");
  return version == nullptr ? "" : fmt::format("{}.{}", version() >> 16, version() & 0xffff);
}

/// The transports' libraries that this process has loaded.
ordered_json libraries() {
  std::map<std::string, std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path == std::string::npos) continue;
    const std::string file = line.substr(path), name = fs::path(file).filename();
    for (const char* kind : {"libucp", "libmpi", "libmpich", "libnccl", "libfabric"})
      if (name.starts_with(std::string(kind) + ".so")) files[kind] = file;
  }
  ordered_json all = ordered_json::array();
  for (const auto& [kind, file] : files) {
    void* library = ::dlopen(file.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    all.push_back({{"name", kind}, {"file", file}, {"version", library == nullptr ? "" : version_of(kind, library)}});
    if (library != nullptr) ::dlclose(library);
  }
  return all;
}

/// Collective: each rank's text, by rank.
std::vector<std::string> gather_texts(comm::HostCollectives& world, const std::string& mine) {
  std::uint64_t longest = mine.size() + 1;
  world.all_reduce(&longest, 1, comm::ReduceOp::max(), "bench");
  std::vector<std::uint8_t> padded(longest, 0);
  std::ranges::copy(mine, padded.begin());
  std::vector<std::string> texts;
  for (const std::vector<std::uint8_t>& text : world.gather_all(padded))
    texts.emplace_back(text.begin(), std::ranges::find(text, 0));
  return texts;
}

void compare_values(const std::string& where, const ordered_json& before, const ordered_json& after,
                    std::vector<std::string>& found) {
  if (before == after) return;
  if (before.is_object() && after.is_object()) {
    std::set<std::string> names;
    for (const ordered_json* side : {&before, &after})
      for (const auto& [name, value] : side->items()) names.insert(name);
    for (const std::string& name : names)
      if (name != "load")
        compare_values(where + " " + name, before.value(name, ordered_json()), after.value(name, ordered_json()),
                       found);
    return;
  }
  if (before.is_array() && after.is_array() && before.size() == after.size() && !before.empty() &&
      before[0].is_object()) {
    for (std::size_t i = 0; i < before.size(); ++i)
      compare_values(fmt::format("{} {}", where, i), before[i], after[i], found);
    return;
  }
  const auto text = [](const ordered_json& value) {
    return value.is_null() ? std::string("not there") : value.is_string() ? value.get<std::string>() : json_text(value);
  };
  found.push_back(fmt::format("{}: {} -> {}", where, text(before), text(after)));
}

}  // namespace

ordered_json gather_environment(comm::HostCollectives& world) {
  try {
    const std::vector<std::string> keys = gather_texts(world, this_host().key);
    const auto first_of = [&](const std::string& key) { return std::ranges::find(keys, key) - keys.begin(); };
    const std::vector<int> cores = allowed_cores();
    ordered_json mine = {{"rank", {{"cores", cores}, {"numa_nodes", nodes_of(cores)}}}};
    if (first_of(this_host().key) == world.rank()) mine["host"] = describe_host();
    ordered_json hosts = ordered_json::array(), ranks = ordered_json::array();
    std::map<std::string, std::size_t> host_of;
    for (const std::string& text : gather_texts(world, json_text(mine))) {
      const ordered_json one = base::parse_json<ordered_json>(text, "a rank's environment");
      const std::string& key = keys[ranks.size()];
      if (one.contains("host")) {
        host_of.emplace(key, hosts.size());
        hosts.push_back(one["host"]);
      }
      ordered_json rank = {{"rank", ranks.size()}, {"host", host_of.at(key)}};
      rank.update(one["rank"]);
      ranks.push_back(rank);
    }
    return {{"hosts", hosts}, {"ranks", ranks}, {"libraries", libraries()}};
  } catch (const base::InvalidUsage&) {  // on all ranks alike: the forced algorithm refuses this number of ranks
  } catch (const base::Unsupported&) {
  }
  return ordered_json::object();
}

std::optional<NominalLink> nominal_link(const ordered_json& environment) {
  const ordered_json hosts = environment.value("hosts", ordered_json::array());
  std::optional<NominalLink> least;
  for (const ordered_json& host : hosts) {
    NominalLink best;
    for (const ordered_json& nic : host.value("nics", ordered_json::array())) {
      const double mbit = nic.at("speed_mbit").is_number() ? nic["speed_mbit"].get<double>() : 0;
      if (mbit * 1e6 / 8 * 1e-9 > best.gbps)
        best = {mbit * 1e6 / 8 * 1e-9, fmt::format("{} of {}, {:.0f} Mbit/s", nic.at("name").get<std::string>(),
                                                   host.at("name").get<std::string>(), mbit)};
    }
    if (best.gbps == 0) return std::nullopt;
    if (!least || best.gbps < least->gbps) least = best;
  }
  return hosts.size() > 1 ? least : std::nullopt;
}

std::vector<std::string> load_warnings(const ordered_json& environment) {
  std::vector<std::string> found;
  for (const ordered_json& host : environment.value("hosts", ordered_json::array())) {
    if (!host.at("load").is_number() || host["load"] <= host.at("cores")) continue;
    const std::string line = fmt::format(
        "{}: the load average was {:.1f} on {} cores before the measurement: other programs "
        "may slow it down",
        host.at("name").get<std::string>(), host["load"].get<double>(), host["cores"].get<int>());
    if (std::ranges::find(found, line) == found.end()) found.push_back(line);  // namespaces of one host
  }
  return found;
}

std::vector<std::string> environment_differences(const ordered_json& before, const ordered_json& after) {
  std::vector<std::string> found;
  compare_values("version", before.value("version", ordered_json()), after.value("version", ordered_json()), found);
  const auto list = [](const ordered_json& json, const char* name) { return json.value(name, ordered_json::array()); };
  const ordered_json hosts = list(before, "hosts"), others = list(after, "hosts");
  if (hosts.size() != others.size()) found.push_back(fmt::format("hosts: {} -> {}", hosts.size(), others.size()));
  for (std::size_t i = 0; i < std::min(hosts.size(), others.size()); ++i)
    compare_values(fmt::format("host {}", i), hosts[i], others[i], found);
  for (const ordered_json& one : list(before, "backends"))
    for (const ordered_json& other : list(after, "backends"))
      if (one.at("backend") == other.at("backend")) compare_values(one["backend"], one, other, found);
  const std::vector<std::string> loads[2] = {load_warnings(before), load_warnings(after)};
  if (loads[0].empty() != loads[1].empty()) {
    const std::vector<std::string>& lines = loads[loads[0].empty() ? 1 : 0];
    for (const std::string& line : lines) found.push_back((loads[0].empty() ? "after, " : "before, ") + line);
  }
  return found;
}

}  // namespace tessera::tools
