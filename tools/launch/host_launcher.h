// The launcher of ranks on several hosts: one ssh connection to each, which starts the ranks there (host_connection.h).
//
// The ranks are numbered by host. When one fails, or a connection ends, the others get the same time as under the local
// launcher, and the first cause is named with its host. A far side whose connection ends kills its ranks.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// A host and its number of ranks.
struct HostSlots {
  std::string name;  ///< as ssh takes it
  int slots = 0;     ///< 0: not given
};

/// The options by which a command names hosts and how it reaches them.
struct HostOptions {
  std::string hosts;
  std::string hostfile;
  std::string ssh = "ssh";           ///< program and options
  std::string remote_tessera;        ///< on the hosts; "": the path of this program
  std::string address;               ///< of the first host, for the others, perhaps with a port; "": by the route
  std::string directory;             ///< of the ranks; "": this one
  std::vector<std::string> forward;  ///< variables to forward beside those that begin with TESSERA_
  /// Throws InvalidUsage if another of these options is given without hosts.
  bool given() const;
};

/// The options, with files and defaults resolved, and what runs.
struct HostLaunchSpec {
  HostOptions options;
  std::vector<HostSlots> hosts;      ///< with their numbers of ranks
  std::vector<std::string> ssh;      ///< program and options
  std::vector<std::string> command;  ///< the program and its arguments
  bool tag = false;
  bool bind_to_cores = false;
  std::optional<std::filesystem::path> log_dir;
};
void add_host_options(CLI::App& command, HostOptions& options);
/// The spec without its command. Throws InvalidUsage.
HostLaunchSpec host_launch_spec(const HostOptions& options, const std::optional<int>& ranks);

/// As launch(). Throws InvalidUsage, SystemError.
int launch_on_hosts(const HostLaunchSpec& spec);

}  // namespace tessera::tools
