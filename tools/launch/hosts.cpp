// The hosts of `tessera run --hosts` and `--hostfile`, and which ranks each gets.
#include <algorithm>
#include <iterator>
#include <sstream>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"
#include "tools/cli/validators.h"
#include "tools/launch/host_launcher.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

constexpr int kMaxSlots = 1024;

/// "host", "host:slots" or "[fe80::1]:slots"; an address with several colons has no slots without brackets.
HostSlots host_of(std::string text, const std::string& where) {
  HostSlots host;
  const std::size_t colon = text.rfind(':');
  const bool bracket = text.find(']') != std::string::npos;
  if (colon != std::string::npos && (bracket ? text[colon - 1] == ']' : text.find(':') == colon)) {
    host.slots = static_cast<int>(base::parse_integer(text.substr(colon + 1), where + ": slots", 1, kMaxSlots));
    text.erase(colon);
  }
  std::erase_if(text, [](char c) { return c == '[' || c == ']'; });
  // A name that begins with - would be an option of ssh.
  if (text.empty() || text.front() == '-' || text.find_first_of(" \t'\"\\;&|$`") != std::string::npos)
    throw base::InvalidUsage(where + ": '" + text + "' is no host; write host or host:slots");
  host.name = std::move(text);
  return host;
}

/// Parses "a,b:4,user@c". Throws InvalidUsage.
std::vector<HostSlots> parse_hosts(const std::string& list) {
  std::vector<HostSlots> hosts;
  std::istringstream parts(list + ",");
  for (std::string part; std::getline(parts, part, ',');) hosts.push_back(host_of(part, "--hosts"));
  return hosts;
}

/// Reads a file with a host a line: `host`, `host:slots` or `host slots=N`; # begins a comment. Throws InvalidUsage.
std::vector<HostSlots> read_hostfile(const std::string& path) {
  const base::FileText file = base::read_regular(path);
  if (!file.problem.empty())
    throw base::InvalidUsage("--hostfile: can't read '" + path + "': " + file.problem + "; give a file of hosts");
  std::vector<HostSlots> hosts;
  std::istringstream lines(file.text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string where = "--hostfile " + path + ":" + std::to_string(++number);
    std::istringstream words(line.substr(0, line.find('#')));
    std::string word;
    if (!(words >> word)) continue;
    HostSlots host = host_of(word, where);
    while (words >> word) {
      constexpr std::string_view kSlots = "slots=";
      if (!word.starts_with(kSlots) || host.slots != 0)
        throw base::InvalidUsage(where + ": '" + word + "'; a line is: host, host:slots or host slots=N");
      host.slots = static_cast<int>(base::parse_integer(word.substr(kSlots.size()), where + ": slots", 1, kMaxSlots));
    }
    hosts.push_back(std::move(host));
  }
  if (hosts.empty()) throw base::InvalidUsage("--hostfile " + path + ": no host in it; write one on each line");
  return hosts;
}

/// Gives the ranks to the hosts in their order; slots of a host that is named twice are added. Without `ranks` every
/// slot gets one, and a host without slots counts as one slot. With `ranks`, hosts get equal parts if none has slots;
/// hosts without ranks are left out. Throws InvalidUsage if there are fewer slots than ranks.
std::vector<HostSlots> place_ranks(const std::vector<HostSlots>& hosts, const std::optional<int>& ranks) {
  std::vector<HostSlots> placed;
  for (const HostSlots& host : hosts) {
    const auto same = std::ranges::find(placed, host.name, &HostSlots::name);
    if (same == placed.end())
      placed.push_back(host);
    else
      same->slots = std::max(same->slots, 1) + std::max(host.slots, 1);
  }
  const int count = static_cast<int>(placed.size());
  const bool equal = std::ranges::all_of(placed, [](const HostSlots& host) { return host.slots == 0; });
  int slots = 0;
  for (int i = 0; i < count; ++i) {
    HostSlots& host = placed[static_cast<std::size_t>(i)];
    if (equal && ranks)
      host.slots = *ranks / count + (i < *ranks % count ? 1 : 0);
    else
      host.slots = std::max(host.slots, 1);
    slots += host.slots;
  }
  if (ranks.value_or(slots) > slots)
    throw base::InvalidUsage("run: " + std::to_string(*ranks) + " ranks don't fit into the " + std::to_string(slots) +
                             " slots of the hosts; give the hosts more slots, or fewer ranks");
  int left = ranks.value_or(slots);
  for (HostSlots& host : placed) {
    host.slots = std::min(host.slots, left);
    left -= host.slots;
  }
  std::erase_if(placed, [](const HostSlots& host) { return host.slots == 0; });
  return placed;
}

}  // namespace

void add_host_options(CLI::App& command, HostOptions& options) {
  CLI::Option* hosts =
      add_option(command, "--hosts", options.hosts, "hosts to start ranks on through ssh", "A,B[:SLOTS]");
  CLI::Option* file = add_option(command, "--hostfile", options.hostfile,
                                 "file of hosts, one a line: host, host:slots or host slots=N", "FILE");
  file->excludes(hosts);
  add_option(command, "--ssh", options.ssh, "the ssh program and its options, divided at spaces", "COMMAND");
  add_option(command, "--remote-tessera", options.remote_tessera, "tessera on the hosts; default: the path of this one",
             "PATH");
  add_option(command, "--address", options.address,
             "address of the first host for the others; default: where its route to the second begins", "ADDR[:PORT]");
  add_option(command, "--directory", options.directory, "directory of the ranks on the hosts; default: this one",
             "DIR");
  add_option(command, "--forward", options.forward,
             "environment variables that ranks on the hosts get, beside TESSERA_*", list_of("A,B"));
}

bool HostOptions::given() const {
  if (!hosts.empty() || !hostfile.empty()) return true;
  if (ssh != "ssh" || !remote_tessera.empty() || !address.empty() || !directory.empty() || !forward.empty())
    throw base::InvalidUsage(
        "--ssh, --remote-tessera, --address, --directory and --forward are for ranks on hosts; give --hosts or "
        "--hostfile");
  return false;
}

HostLaunchSpec host_launch_spec(const HostOptions& options, const std::optional<int>& ranks) {
  HostLaunchSpec spec{.options = options};
  spec.hosts = place_ranks(options.hosts.empty() ? read_hostfile(options.hostfile) : parse_hosts(options.hosts), ranks);
  std::istringstream words(options.ssh);
  spec.ssh.assign(std::istream_iterator<std::string>(words), {});
  if (spec.ssh.empty()) throw base::InvalidUsage("--ssh: no program; write --ssh 'ssh -F FILE'");
  if (options.address.empty()) spec.options.address = comm_variable("TESSERA_MASTER").value_or("");
  if (options.remote_tessera.empty())
    spec.options.remote_tessera = std::filesystem::read_symlink("/proc/self/exe").string();
  return spec;
}

}  // namespace tessera::tools
