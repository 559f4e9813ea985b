// Devices, which own memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// The kind of a device.
enum class DeviceType : std::uint8_t {
  cpu,   ///< the host and its memory
  cuda,  ///< an NVIDIA GPU, by a loadable module
  meta,  ///< shapes without data: construction and planning
};

/// A device by kind and number. A value type, which opens and owns nothing; see open_device().
struct Device {
  DeviceType type = DeviceType::cpu;               ///< default: the host
  int index = 0;                                   ///< index of the GPU, from 0; 0 for cpu and meta
  bool operator==(const Device&) const = default;  ///< compares type and index
};

/// "cpu", "meta", "cuda:0".
TESSERA_API std::string name_of(Device device);

/// The inverse of name_of; "cuda" is "cuda:0". Throws InvalidUsage.
TESSERA_API Device parse_device(std::string_view name);

}  // namespace tessera::base
