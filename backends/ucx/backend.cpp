// The entry of this backend in the registry.
#include <signal.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>

#include <mutex>
#include <string>
#include <vector>

#include "backends/ucx/link.h"
#include "tessera/base/env.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/tag_matching_transport.h"
#include "tessera/comm/transport/cma.h"

namespace tessera::comm::ucx {
namespace {

/// When loaded, UCX installs handlers for crash signals that print and wait for a debugger. That decision belongs to
/// the program, or to a user who sets the variable.
void leave_signals_alone() {
  if (read_foreign_env("UCX_ERROR_SIGNALS") || read_foreign_env("UCX_HANDLE_ERRORS")) return;
  static std::once_flag once;  // UCX complains about a second call
  std::call_once(once, [] {
    for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) ucs_debug_disable_signal(signal);
  });
}

std::string probe() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  if (major == UCP_API_MAJOR && minor >= UCP_API_MINOR) return "";
  return "built for UCX " + std::to_string(UCP_API_MAJOR) + "." + std::to_string(UCP_API_MINOR) + ", found " +
         ucp_get_version_string();
}

/// Releases of one minor version have the same protocol.
std::vector<SharedSetting> version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  ucp_get_version(&major, &minor, &release);
  return {{"UCX's version", std::to_string(major) + "." + std::to_string(minor)}};
}

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  require_alike(*bootstrap, version, options.global_ranks);
  return make_host_communicator(
      std::move(bootstrap), options, "ucx",
      [](Bootstrap& ranks, TransportEvents& events, const BackendOptions&) { return make_transport(ranks, events); });
}

}  // namespace

std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events) {
  leave_signals_alone();
  return std::make_unique<TagMatchingTransport>(bootstrap, events, [&](LinkEvents& link_events) {
    return std::make_unique<CmaLink>(
        bootstrap, cma_processes(bootstrap, may_share_memory()), link_events,
        [&](LinkEvents& am_events) { return std::make_unique<UcxLink>(bootstrap, am_events); });
  });
}

const comm::Backend& backend();  // declared by the generated list
const comm::Backend& backend() {
  static const comm::Backend kBackend{
      .name = "ucx", .devices = "cpu", .probe = probe, .create = create, .variables = {}};
  return kBackend;
}

}  // namespace tessera::comm::ucx
