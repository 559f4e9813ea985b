#include "tessera/comm/bootstrap.h"

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tessera/comm/rendezvous_store.h"

namespace tessera::comm {

Bootstrap::~Bootstrap() = default;
ControlChannel::~ControlChannel() = default;
RendezvousStore::~RendezvousStore() = default;

std::vector<std::shared_ptr<void>> Bootstrap::all_gather_objects(std::shared_ptr<void>) {
  throw Unsupported("bootstrap: these ranks are not threads of one process");
}

std::vector<UniqueFd> Bootstrap::all_gather_fds(int) {
  throw Unsupported("bootstrap: these ranks are not on one host");
}

void require_one_host(const Bootstrap& bootstrap, std::string_view what, std::string_view advice) {
  const std::vector<std::string>& hosts = bootstrap.hosts();
  for (std::size_t r = 1; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[0]) continue;
    throw InvalidUsage(std::string(what) + " needs all ranks on one host: rank " + std::to_string(r) + " is on host " +
                       printable(hosts[r]) + ", rank 0 on " + printable(hosts[0]) + std::string(advice));
  }
}

}  // namespace tessera::comm
