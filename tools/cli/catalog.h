// What this program has: the lists behind `tessera info`.
#pragma once

#include <string>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/env.h"
#include "tessera/comm/registry.h"

namespace tessera::tools {

struct BackendEntry {
  std::string name;
  bool available = false;
  std::string reason;  ///< why it isn't, or what it found
  std::vector<std::string> devices;
};

struct ModelEntry {
  std::string name;
  std::string shape;  ///< "2 layers, width 64, ..."
  std::uint64_t parameters = 0;
};

struct Catalog {
  std::vector<BackendEntry> backends;
  std::vector<base::DeviceInfo> devices;
  std::vector<std::string> strategies;
  std::vector<std::string> collectives;
  std::vector<ModelEntry> models;
  std::vector<comm::ModuleVariable> variables;  ///< those of modules too
};

/// What the program's own parts declare, sorted by name. Modules have more: those are in the catalog.
std::vector<base::EnvVariable> all_variables();

/// Asks each library for what it offers.
Catalog catalog();

}  // namespace tessera::tools
