#include "tools/cli/machine.h"

#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <fmt/format.h>

#include <fstream>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tessera/nn/fp8.h"
#include "tools/cli/output.h"
#include "tools/launch/process.h"

namespace tessera::tools {
namespace {

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const std::size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown processor";
}

}  // namespace

std::string machine_line() {
  const std::size_t cores = allowed_cores().size();
  std::string text = processor() + ", " + std::to_string(cores) + (cores == 1 ? " core" : " cores");
  struct sysinfo memory {};
  if (::sysinfo(&memory) == 0) text += ", " + human_bytes(static_cast<double>(memory.totalram) * memory.mem_unit);
  utsname system{};
  if (::uname(&system) == 0) text += std::string(", ") + system.sysname + " " + system.release + " " + system.machine;
  return text;
}

void add_device_option(CLI::App& command, std::string& name) {
  command.add_option("--device", name, "device that ranks compute on: cpu, cuda, or cuda:N for one of several")
      ->type_name("NAME")
      ->capture_default_str();
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
