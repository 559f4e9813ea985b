// Devices, which own memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

enum class DeviceType : std::uint8_t {
  cpu,
  cuda,
  meta,  ///< shapes without data: construction and planning
};

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

/// "cpu", "meta", "cuda:0".
TESSERA_API std::string name_of(Device device);

/// The inverse of name_of; "cuda" is "cuda:0". Throws InvalidUsage.
TESSERA_API Device parse_device(std::string_view name);

}  // namespace tessera::base
