// The entry of this backend in the registry; compiled once for each MPI (TESSERA_MPIRUN is its launcher).
#include <unistd.h>

#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "backends/mpi/library.h"
#include "backends/mpi/link.h"
#include "tessera/base/device/module_loader.h"
#include "tessera/base/env.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/tag_matching_transport.h"

namespace tessera::comm::mpi {
namespace {

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  return make_host_communicator(
      std::move(bootstrap), options, "mpi",
      [](Bootstrap& ranks, TransportEvents& events, const BackendOptions& own) {
        log_end_to(own.communicator.logger);
        return make_transport(ranks, events, own.communicator.timeout);
      },
      native_kinds());
}

/// The launchers' own protocols have no authentication, but they and the libraries below MPI listen at all interfaces.
/// The ranks are on one host, and need the loopback interface only. What the user has set stays.
std::vector<std::string> launch_environment() {
  std::vector<std::string> all;
  const auto add = [&](const std::string& name, const std::string& value, std::initializer_list<const char*> others) {
    bool is_set = read_foreign_env(name).has_value();
    for (const char* const other : others) is_set |= read_foreign_env(other).has_value();
    if (!is_set) all.push_back(name + "=" + value);
  };
  add("UCX_NET_DEVICES", "lo", {"UCX_TLS"});
#ifdef OPEN_MPI
  add("OMPI_MCA_btl", "self,vader", {"OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude"});
  // Open MPI's own directory in /tmp has a name that another user could take.
  add("OMPI_MCA_orte_tmpdir_base", "{private}", {"TMPDIR"});
#else
  add("FI_TCP_IFACE", "lo", {"FI_PROVIDER"});
#endif
  // No setting binds the launchers' own ports. The loader takes colons and spaces as separators.
  const std::string bind = base::module_directory() + "/launch/loopback-bind.so";
  const std::string preloaded = read_foreign_env("LD_PRELOAD").value_or("");
  if (bind.find_first_of(": ") == std::string::npos && ::access(bind.c_str(), R_OK) == 0)
    all.push_back("LD_PRELOAD=" + bind + (preloaded.empty() ? "" : ":") + preloaded);
  return all;
}

/// The ranks start on this host. Inside a job of Slurm the launchers would start them through srun, on any of its
/// hosts, and in a step of that job srun would wait for the resources that the step itself holds.
std::vector<std::string_view> launch_prefix() {
  static const std::vector<std::string> kEnvironment = launch_environment();
  std::vector<std::string_view> prefix(kEnvironment.begin(), kEnvironment.end());
  prefix.insert(prefix.end(), {TESSERA_MPIRUN, "-n", "{ranks}"});
#ifdef OPEN_MPI
  static const std::string kHere = "localhost:" + std::to_string(std::thread::hardware_concurrency());
  if (read_foreign_env("SLURM_JOB_ID"))
    for (const std::string_view option : {std::string_view("--host"), std::string_view(kHere)})
      prefix.push_back(option);
  // A rank has several threads, which would wait for each other if bound to one core.
  for (const std::string_view option : {"--oversubscribe", "--bind-to", "none"}) prefix.push_back(option);
  if (::geteuid() == 0) prefix.push_back("--allow-run-as-root");
#else
  for (const std::string_view option : {"-launcher", "fork", "-hosts", "localhost"}) prefix.push_back(option);
#endif
  return prefix;
}

}  // namespace

std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                          std::chrono::milliseconds timeout, std::size_t max_chunk) {
  return std::make_unique<TagMatchingTransport>(bootstrap, events, [&](LinkEvents& link_events) {
    return std::make_unique<MpiLink>(bootstrap, events, link_events, timeout, max_chunk);
  });
}

const comm::Backend& backend();  // declared by the generated list
const comm::Backend& backend() {
  static const std::vector<std::string_view> kPrefix = launch_prefix();
  static const comm::Backend kBackend{.name = "mpi",
                                      .devices = "cpu",
                                      .probe = wrong_library,
                                      .create = create,
                                      .variables = {},
                                      .launch_prefix = kPrefix};
  return kBackend;
}

}  // namespace tessera::comm::mpi
