// The machine: its description, and the device on which a rank computes (--device).
#pragma once

#include <CLI/CLI.hpp>
#include <istream>
#include <string>
#include <vector>

#include "tessera/base/device.h"

namespace tessera::tools {

/// The processor's name in the format of /proc/cpuinfo, which on arm64 has numbers of the company and the core.
std::string processor_in(std::istream& cpuinfo);

/// The cores that this process may use.
std::vector<int> allowed_cores();

/// One line: processor, cores that this process may use, memory, system.
std::string machine_line();

/// Adds --device to a subcommand; `name` holds the default.
void add_device_option(CLI::App& command, std::string& name);

/// Throws InvalidUsage with the reason if the device can't be used on this host.
void check_device(const std::string& name);

/// Throws InvalidUsage if a device that `name` selects can't multiply 8-bit floating-point numbers.
void check_fp8(const std::string& name);

/// The device of this rank: "cuda" without a number is distributed over the ranks of the host.
base::Device device_of_rank(const std::string& name);

}  // namespace tessera::tools
