#include "backends/tcp/connection_mesh.h"

#include <sstream>

#include "backends/tcp/interface.h"
#include "backends/tcp/mesh_connector.h"
#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

constexpr const char* kHere = "tessera-tcp-2";  // the first word of a rank's line
constexpr const char* kWrong = "wrong";
constexpr const char* kFailed = "failed";

/// All ranks throw the first rank's error, with its rank.
void rethrow_first(const std::vector<std::string>& lines) {
  for (std::size_t r = 0; r < lines.size(); ++r) {
    const auto said = [&](const char* word) { return lines[r].rfind(word, 0) == 0; };
    const auto text = [&](const char* word) {
      return "rank " + std::to_string(r) + ": " + lines[r].substr(std::string(word).size() + 1);
    };
    if (said(kWrong)) throw InvalidUsage(text(kWrong));
    if (said(kFailed)) throw Timeout(text(kFailed));
  }
}

/// Returns "tessera-tcp-2 STREAMS CHECKSUM PORT ADDRESS" of this rank, or an error line.
std::string open_listener(MeshConnector& connector, const Bootstrap& bootstrap, const TcpOptions& settings,
                          int streams) {
  try {
    const Address usual = boost::asio::ip::make_address(bootstrap.local_address());
    const Address address = choose_address(settings.interfaces, list_interfaces(), usual);
    const Endpoint endpoint = connector.listen(address);
    return std::string(kHere) + " " + std::to_string(streams) + " " +
           std::to_string(static_cast<int>(settings.checksum)) + " " + std::to_string(endpoint.port()) + " " +
           address.to_string();
  } catch (const InvalidUsage& error) {
    return std::string(kWrong) + " " + error.what();
  } catch (const std::exception& error) {
    return std::string(kFailed) + " " + error.what();
  }
}

std::vector<Endpoint> read_lines(const std::vector<std::string>& lines, int own_streams, Checksum own_checksum) {
  std::vector<Endpoint> endpoints;
  for (std::size_t r = 0; r < lines.size(); ++r) {
    std::istringstream words(lines[r]);
    std::string format, address;
    int streams = 0, checksum = 0;
    std::uint16_t port = 0;
    boost::system::error_code error;
    words >> format >> streams >> checksum >> port >> address;
    const Address numeric = boost::asio::ip::make_address(address, error);
    if (!words || format != kHere || error)
      throw SystemError("tcp: rank " + std::to_string(r) + " runs another version of the library");
    if (streams != own_streams)
      throw InvalidUsage("tcp: TESSERA_TCP_STREAMS is " + std::to_string(own_streams) + " on this rank and " +
                         std::to_string(streams) + " on rank " + std::to_string(r) +
                         "; use the same value on all ranks");
    if (checksum != static_cast<int>(own_checksum))
      throw InvalidUsage("tcp: TESSERA_TCP_CHECKSUM (or TESSERA_CHECK) differs between this rank and rank " +
                         std::to_string(r) + "; use the same value on all ranks");
    endpoints.emplace_back(numeric, port);
  }
  return endpoints;
}

}  // namespace

ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout) {
  const int streams = streams_for(settings, bootstrap.hosts());
  MeshConnector connector(bootstrap.rank(), streams, bootstrap.token());
  const std::vector<std::string> lines = bootstrap.all_gather(open_listener(connector, bootstrap, settings, streams));
  rethrow_first(lines);
  const std::vector<Endpoint> endpoints = read_lines(lines, streams, settings.checksum);
  // A quarter of the timeout remains to report the unreachable ranks.
  const std::string complaint = connector.run(endpoints, timeout / 4 * 3);
  rethrow_first(bootstrap.all_gather(complaint.empty() ? "" : std::string(kFailed) + " " + complaint));
  return {connector.release_streams(), checked_peers(settings.checksum, bootstrap.hosts(), bootstrap.rank()),
          endpoints[static_cast<std::size_t>(bootstrap.rank())].address().to_string()};
}

}  // namespace tessera::comm::tcp
