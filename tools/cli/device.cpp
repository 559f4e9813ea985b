#include "tools/cli/device.h"

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"

namespace tessera::tools {

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

base::Device device_of_rank(const std::string& name) {
  base::Device device = base::parse_device(name);
  if (device.type != base::DeviceType::cuda || name.find(':') != std::string::npos) return device;
  for (const base::DeviceInfo& state : base::list_devices())
    if (state.name == name && !state.devices.empty())
      device.index = comm::resolve_launch().local_rank % static_cast<int>(state.devices.size());
  return device;
}

}  // namespace tessera::tools
