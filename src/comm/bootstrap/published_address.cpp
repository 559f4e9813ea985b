#include "tessera/comm/bootstrap/published_address.h"

#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::comm {
namespace {

constexpr std::string_view kFormat = "tessera-rank0-1";

}  // namespace

std::string PublishedAddress::text() const {
  std::string all = std::string(kFormat) + "\n" + host + "\n" + socket + "\n" + to_hex(token) + "\n";
  for (const HostPort& place : places) all += place.text() + "\n";
  return all;
}

PublishedAddress PublishedAddress::parse(const std::string& text) {
  std::istringstream lines(text);
  std::string format;
  std::string token;
  PublishedAddress address;
  std::getline(lines, format);
  std::getline(lines, address.host);
  std::getline(lines, address.socket);
  std::getline(lines, token);
  if (format != kFormat || token.size() != 2 * sizeof(Digest))
    throw SystemError("init: the store has " + printable(text.substr(0, 40)) + " where rank 0 publishes its address");
  address.token = from_hex(token);
  for (std::string place; std::getline(lines, place);)
    address.places.push_back(parse_host_port(place, "init: rank 0's address"));
  return address;
}

std::vector<UniqueFd> listen_for_all(const std::string& host, PublishedAddress& address) {
  address = {.host = host, .socket = "tessera-" + to_hex(random_digest()).substr(0, 32), .token = random_digest()};
  std::vector<UniqueFd> listeners = listen_at_free_port(address.places);
  listeners.push_back(listen_on(address.socket));
  return listeners;
}

Connection connect_at_place(const PublishedAddress& address, std::size_t attempt, Deadline deadline, std::string& why) {
  const HostPort& place = address.places[attempt % address.places.size()];
  Connection connection = connect_at(place, deadline, why);
  why = place.text() + ": " + why;
  return connection;
}

}  // namespace tessera::comm
