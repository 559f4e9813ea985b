#include "backends/tcp/connection_mesh.h"

#include <algorithm>
#include <sstream>

#include "backends/tcp/interface.h"
#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

/// The scope of a link-local IPv6 address: the number that this host has given to the interface.
unsigned long scope_of(const Address& address) { return address.is_v6() ? address.to_v6().scope_id() : 0; }

Address with_scope(const Address& address, unsigned long scope) {
  if (!address.is_v6() || !address.to_v6().is_link_local()) return address;
  return boost::asio::ip::address_v6(address.to_v6().to_bytes(), scope);
}

/// Returns "PORT ADDRESS" of this rank.
std::string open_listener(MeshConnector& connector, const Bootstrap& bootstrap, const TcpOptions& settings) {
  const std::vector<Interface> interfaces = list_interfaces();
  const auto& hosts = bootstrap.hosts();
  const bool alone = std::ranges::count(hosts, hosts[static_cast<std::size_t>(bootstrap.rank())]) == 1;
  if (!alone &&
      std::ranges::none_of(interfaces, [](const Interface& one) { return one.up && one.address.is_loopback(); }))
    throw SystemError(
        "tcp: the loopback interface of this rank's host is down, by which the ranks on it connect (ip link set lo "
        "up)");
  const Address usual = boost::asio::ip::make_address(bootstrap.local_address());
  const Address address = choose_address(settings.interfaces, interfaces, usual);
  return std::to_string(connector.listen(address).port()) + " " + with_scope(address, 0).to_string();
}

/// Link-local addresses get this rank's scope.
std::vector<Endpoint> read_lines(const std::vector<std::string>& lines, unsigned long scope) {
  std::vector<Endpoint> endpoints;
  for (const std::string& line : lines) {
    std::istringstream words(line);
    std::string address;
    std::uint16_t port = 0;
    words >> port >> address;
    boost::system::error_code error;
    endpoints.emplace_back(with_scope(boost::asio::ip::make_address(address, error), scope), port);
    if (!words || error)
      throw SystemError("tcp: rank " + std::to_string(endpoints.size() - 1) + " sent no address: '" + line + "'");
  }
  return endpoints;
}

}  // namespace

ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout,
                            const TlsContext* tls) {
  const int streams = streams_for(settings, bootstrap.hosts());
  const bool on_demand = connects_on_demand(settings, bootstrap.size(), streams);
  require_alike(bootstrap, [&] { return shared_settings(settings, streams, on_demand); });
  auto connector = std::make_unique<MeshConnector>(bootstrap.rank(), streams, bootstrap.token(), tls);
  const std::vector<std::string> lines =
      exchange(bootstrap, [&] { return open_listener(*connector, bootstrap, settings); });
  const std::vector<Endpoint> endpoints =
      read_lines(lines, scope_of(boost::asio::ip::make_address(bootstrap.local_address())));
  const auto limit = timeout / 4 * 3;  // a quarter of the timeout remains to report the unreachable ranks
  ConnectionMesh mesh;
  mesh.codes = tls != nullptr ? std::vector<FrameCodes>(lines.size(), FrameCodes::header_checksum)
                              : codes_by_rank(settings, bootstrap.hosts(), bootstrap.rank());
  mesh.address = endpoints[static_cast<std::size_t>(bootstrap.rank())].address().to_string();
  if (on_demand) {
    connector->serve(endpoints, limit);
    mesh.connector = std::move(connector);
    mesh.connections.resize(lines.size());
    return mesh;
  }
  exchange(bootstrap, [&] {
    const std::string complaint = connector->run(endpoints, limit);
    if (!complaint.empty()) throw Timeout(complaint);
    return complaint;
  });
  mesh.connections = connector->release_streams();
  return mesh;
}

}  // namespace tessera::comm::tcp
