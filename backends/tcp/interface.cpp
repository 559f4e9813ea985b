#include "backends/tcp/mesh_connector.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <boost/asio/ip/network_v4.hpp>
#include <boost/asio/ip/network_v6.hpp>
#include <cstring>
#include <memory>
#include <optional>

#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

namespace ip = boost::asio::ip;

std::optional<Address> address_of(const sockaddr* address) {
  if (address == nullptr) return std::nullopt;
  if (address->sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof(v4));
    return ip::address_v4(ntohl(v4.sin_addr.s_addr));
  }
  if (address->sa_family != AF_INET6) return std::nullopt;
  sockaddr_in6 v6;
  std::memcpy(&v6, address, sizeof(v6));
  ip::address_v6::bytes_type bytes;
  std::memcpy(bytes.data(), &v6.sin6_addr, bytes.size());
  return ip::address_v6(bytes);
}

/// Such an address is valid only with an interface of the host that uses it.
bool is_link_local(const Address& address) { return address.is_v6() && address.to_v6().is_link_local(); }

template <class Network, class Host>
bool in_network(const Network& network, const Host& host) {
  return Network(host, network.prefix_length()).canonical() == network.canonical();
}

/// A name, or a network such as 10.0.0.0/8.
bool matches(const std::string& item, const Interface& interface) {
  if (item.find('/') == std::string::npos) return item == interface.name;
  boost::system::error_code error;
  if (interface.address.is_v4()) {
    const auto network = ip::make_network_v4(item, error);
    return !error && in_network(network, interface.address.to_v4());
  }
  const auto network = ip::make_network_v6(item, error);
  return !error && in_network(network, interface.address.to_v6());
}

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> items;
  while (true) {
    const std::size_t comma = list.find(',');
    items.emplace_back(list.substr(0, comma));
    if (comma == std::string_view::npos) return items;
    list.remove_prefix(comma + 1);
  }
}

[[noreturn]] void refuse(std::string_view wanted, std::string_view why, const std::vector<Interface>& interfaces) {
  std::string known;
  for (const Interface& interface : interfaces)
    known += (known.empty() ? "" : ", ") + interface.name + " (" + interface.address.to_string() +
             (interface.up ? ")" : ", down)");
  throw InvalidUsage("tcp: TESSERA_IFNAME=" + std::string(wanted) + ": " + std::string(why) +
                     "; this host has: " + (known.empty() ? "none" : known));
}

void check(const std::string& item, std::string_view wanted, const std::vector<Interface>& interfaces) {
  if (item.empty()) refuse(wanted, "an entry of the list is empty", interfaces);
  if (item.find('/') == std::string::npos) return;
  boost::system::error_code v4, v6;
  ip::make_network_v4(item, v4);
  ip::make_network_v6(item, v6);
  if (v4 && v6) refuse(wanted, "'" + item + "' is not a network such as 10.0.0.0/8", interfaces);
}

}  // namespace

std::vector<Interface> list_interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw system_error("tcp: getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next)
    if (const std::optional<Address> address = address_of(one->ifa_addr))
      interfaces.push_back({one->ifa_name, *address, (one->ifa_flags & IFF_UP) != 0});
  return interfaces;
}

Address choose_address(std::string_view wanted, const std::vector<Interface>& interfaces, const Address& usual) {
  if (wanted.empty()) return usual;
  const bool exclude = wanted.front() == '^';
  const std::vector<std::string> items = split(wanted.substr(exclude ? 1 : 0));
  for (const std::string& item : items) check(item, wanted, interfaces);

  std::vector<Interface> usable = interfaces;
  std::erase_if(usable, [](const Interface& one) { return !one.up || is_link_local(one.address); });
  std::ranges::stable_sort(usable, [&](const Interface& a, const Interface& b) {
    return (a.address.is_v4() == usual.is_v4()) > (b.address.is_v4() == usual.is_v4());
  });
  if (!exclude) {
    for (const std::string& item : items)
      for (const Interface& one : usable)
        if (matches(item, one)) return one.address;
    refuse(wanted, "no interface of that name or network is up and has an address", interfaces);
  }
  std::erase_if(usable, [&](const Interface& one) {
    return std::ranges::any_of(items, [&](const std::string& item) { return matches(item, one); });
  });
  for (const Interface& one : usable)
    if (one.address == usual) return usual;
  for (const Interface& one : usable)
    if (!one.address.is_loopback()) return one.address;
  refuse(wanted, "no other interface is up and has an address", interfaces);
}

}  // namespace tessera::comm::tcp
