#include "tools/cli/machine.h"

#include <sched.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <fmt/format.h>

#include <array>
#include <fstream>
#include <string_view>
#include <utility>

#include "tessera/base/cores.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tessera/nn/fp8.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"

namespace tessera::tools {
namespace {

/// Arm's own cores, by "CPU part"; other companies' servers of today have these, too.
constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kArmCores = {{
    {"0xd03", "Cortex-A53"},
    {"0xd08", "Cortex-A72"},
    {"0xd0b", "Cortex-A76"},
    {"0xd0c", "Neoverse N1"},
    {"0xd40", "Neoverse V1"},
    {"0xd49", "Neoverse N2"},
    {"0xd4f", "Neoverse V2"},
    {"0xd83", "Neoverse V3AE"},
    {"0xd84", "Neoverse V3"},
    {"0xd8e", "Neoverse N3"},
    {"0xd4a", "Neoverse E1"},
}};

std::string arm_core(const std::string& implementer, const std::string& part) {
  if (implementer == "0x41")
    for (const auto& [number, name] : kArmCores)
      if (part == number) return "Arm " + std::string(name);
  return "arm64 processor " + implementer + "/" + part;
}

}  // namespace

std::string processor_in(std::istream& cpuinfo) {
  std::string implementer;
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) return value;
    if (line.starts_with("CPU implementer")) implementer = value;
    if (line.starts_with("CPU part") && !implementer.empty()) return arm_core(implementer, value);
  }
  return "unknown processor";
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

std::string machine_line() {
  const int cores = base::usable_cores();
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string text = processor_in(cpuinfo) + ", " + std::to_string(cores) + (cores == 1 ? " core" : " cores");
  struct sysinfo memory {};
  if (::sysinfo(&memory) == 0) text += ", " + human_bytes(static_cast<double>(memory.totalram) * memory.mem_unit);
  utsname system{};
  if (::uname(&system) == 0) text += std::string(", ") + system.sysname + " " + system.release + " " + system.machine;
  return text;
}

void add_device_option(CLI::App& command, std::string& name) {
  add_option(command, "--device", name, "device that ranks compute on: cpu, cuda, or cuda:N for one of several",
             "NAME");
}

void check_device(const std::string& name) {
  const base::Device device = base::parse_device(name);
  if (device.type == base::DeviceType::cpu) return;
  if (device.type == base::DeviceType::meta)
    throw base::InvalidUsage("--device meta: it holds shapes without data to compute with; use cpu or cuda");
  base::require_device(device);
}

void check_fp8(const std::string& name) {
  const base::Device device = base::parse_device(name);
  if (device.type != base::DeviceType::cuda) return;
  const bool one = name.find(':') != std::string::npos;
  for (const base::DeviceInfo& kind : base::list_devices())
    for (std::size_t i = 0; kind.name == "cuda" && i < kind.devices.size(); ++i) {
      const base::DeviceProperties& gpu = kind.devices[i];
      if (gpu.generation >= nn::kFp8Generation || (one && static_cast<int>(i) != device.index)) continue;
      throw base::InvalidUsage(fmt::format(
          "--precision fp8: {} has compute capability {}.{}, and products in 8 bits need 8.9 or newer (Ada, Hopper); "
          "use --precision bf16",
          gpu.name, gpu.generation / 10, gpu.generation % 10));
    }
}

base::Device device_of_rank(const std::string& name) {
  base::Device device = base::parse_device(name);
  if (device.type != base::DeviceType::cuda || name.find(':') != std::string::npos) return device;
  for (const base::DeviceInfo& state : base::list_devices())
    if (state.name == name && !state.devices.empty())
      device.index = comm::resolve_launch().local_rank % static_cast<int>(state.devices.size());
  return device;
}

}  // namespace tessera::tools
