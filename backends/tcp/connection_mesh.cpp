#include "backends/tcp/connection_mesh.h"

#include <sstream>

#include "backends/tcp/interface.h"
#include "backends/tcp/mesh_connector.h"
#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

/// Returns "PORT ADDRESS" of this rank.
std::string open_listener(MeshConnector& connector, const Bootstrap& bootstrap, const TcpOptions& settings) {
  const Address usual = boost::asio::ip::make_address(bootstrap.local_address());
  const Address address = choose_address(settings.interfaces, list_interfaces(), usual);
  return std::to_string(connector.listen(address).port()) + " " + address.to_string();
}

std::vector<Endpoint> read_lines(const std::vector<std::string>& lines) {
  std::vector<Endpoint> endpoints;
  for (const std::string& line : lines) {
    std::istringstream words(line);
    std::string address;
    std::uint16_t port = 0;
    words >> port >> address;
    boost::system::error_code error;
    endpoints.emplace_back(boost::asio::ip::make_address(address, error), port);
    if (!words || error)
      throw SystemError("tcp: rank " + std::to_string(endpoints.size() - 1) + " sent no address: '" + line + "'");
  }
  return endpoints;
}

}  // namespace

ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout) {
  const int streams = streams_for(settings, bootstrap.hosts());
  require_alike(bootstrap, [&] { return shared_settings(settings, streams); });
  MeshConnector connector(bootstrap.rank(), streams, bootstrap.token());
  const std::vector<std::string> lines =
      exchange(bootstrap, [&] { return open_listener(connector, bootstrap, settings); });
  const std::vector<Endpoint> endpoints = read_lines(lines);
  exchange(bootstrap, [&] {
    // A quarter of the timeout remains to report the unreachable ranks.
    const std::string complaint = connector.run(endpoints, timeout / 4 * 3);
    if (!complaint.empty()) throw Timeout(complaint);
    return complaint;
  });
  return {connector.release_streams(), checked_peers(settings.checksum, bootstrap.hosts(), bootstrap.rank()),
          endpoints[static_cast<std::size_t>(bootstrap.rank())].address().to_string()};
}

}  // namespace tessera::comm::tcp
