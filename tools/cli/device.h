// --device: where a rank computes.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tessera/base/device.h"

namespace tessera::tools {

/// Adds --device to a subcommand; `name` holds the default.
void add_device_option(CLI::App& command, std::string& name);

/// Throws InvalidUsage, saying why, where the device can't be used here.
void check_device(const std::string& name);

/// The device of this rank: "cuda" without a number is shared out over the ranks of the host.
base::Device device_of_rank(const std::string& name);

}  // namespace tessera::tools
