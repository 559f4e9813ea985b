// The entry of this backend in the registry.
#include "backends/tcp/tcp_options.h"
#include "backends/tcp/transport.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::tcp {
namespace {

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  return make_host_communicator(std::move(bootstrap), options, "tcp",
                                [](Bootstrap& others, TransportEvents& events, const BackendOptions& world) {
                                  return make_transport(others, events, world);
                                });
}

}  // namespace

const comm::Backend& backend();  // declared by the generated list
const comm::Backend& backend() {
  static const comm::Backend kBackend{.name = "tcp",
                                      .devices = "cpu",
                                      .probe = [] { return std::string(); },
                                      .create = create,
                                      .variables = variables(),
                                      .encrypts = true};
  return kBackend;
}

}  // namespace tessera::comm::tcp
