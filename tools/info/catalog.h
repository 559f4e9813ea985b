// The parts of this program that `tessera info` lists.
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
  std::string reason;  ///< why it is unavailable, or what was detected
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
  std::vector<comm::ModuleVariable> variables;  ///< including those of modules
};

/// Variables that the program itself declares, sorted by name. The catalog also has those of modules.
std::vector<base::EnvVariable> all_variables();

/// Queries each library for its entries.
Catalog catalog();

}  // namespace tessera::tools
