#include "tessera/base/device.h"

#include <charconv>

#include "tessera/base/error.h"

namespace tessera::base {

std::string name_of(Device device) {
  switch (device.type) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::meta:
      return "meta";
    case DeviceType::cuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "?";
}

Device parse_device(std::string_view name) {
  if (name == "cpu") return {DeviceType::cpu, 0};
  if (name == "meta") return {DeviceType::meta, 0};
  if (name == "cuda") return {DeviceType::cuda, 0};
  if (name.starts_with("cuda:")) {
    int index = -1;
    const std::string_view digits = name.substr(5);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc{} && end == digits.data() + digits.size() && index >= 0) return {DeviceType::cuda, index};
  }
  throw InvalidUsage("unknown device '" + std::string(name) + "'; known: cpu, meta, cuda, cuda:N");
}

}  // namespace tessera::base
