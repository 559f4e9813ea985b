// Selects the address of this host that other ranks connect to.
#pragma once

#include <boost/asio/ip/address.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/base_names.h"

namespace tessera::comm::tcp {

using Address = boost::asio::ip::address;

/// One address of an interface; an interface may have several.
struct Interface {
  std::string name;
  Address address;
  bool up = true;
};

/// Lists all interfaces of this host. Throws SystemError.
std::vector<Interface> list_interfaces();

/// Returns the address to listen on. `wanted` is TESSERA_IFNAME: interfaces in order of preference, by name or by a
/// network that contains one of their addresses ("eth1,10.0.0.0/8"); "^" before a list excludes instead; "" has no
/// preference. `usual` is used if `wanted` leaves the choice open, and its family (IPv4 or IPv6) is preferred. Throws
/// InvalidUsage that lists the interfaces.
Address choose_address(std::string_view wanted, const std::vector<Interface>& interfaces, const Address& usual);

}  // namespace tessera::comm::tcp
