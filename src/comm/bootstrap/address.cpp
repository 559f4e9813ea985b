#include "tessera/comm/bootstrap/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/base/text.h"
#include "tessera/base/thread.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr auto kConnectTime = 3s;  // of one attempt

struct Endpoint {
  sockaddr_storage address{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

struct Resolved {
  std::vector<Endpoint> endpoints;
  std::string error;
};

Resolved resolve_now(const HostPort& where, int flags) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  Resolved resolved;
  const int code = ::getaddrinfo(where.host.c_str(), std::to_string(where.port).c_str(), &hints, &found);
  if (code != 0) resolved.error = "can't resolve host '" + where.host + "': " + ::gai_strerror(code);
  for (const addrinfo* one = code == 0 ? found : nullptr; one != nullptr; one = one->ai_next) {
    Endpoint endpoint;
    endpoint.length = one->ai_addrlen;
    std::memcpy(&endpoint.address, one->ai_addr, one->ai_addrlen);
    resolved.endpoints.push_back(endpoint);
  }
  if (code == 0) ::freeaddrinfo(found);
  return resolved;
}

/// The system's resolver has no deadline, so a thread waits for it and is abandoned at the deadline.
Resolved resolve(const HostPort& where, Deadline deadline) {
  Resolved numeric = resolve_now(where, AI_NUMERICHOST);
  if (!numeric.endpoints.empty()) return numeric;
  auto promise = std::make_shared<std::promise<Resolved>>();
  std::future<Resolved> resolved = promise->get_future();
  base::start_thread([promise, where] { promise->set_value(resolve_now(where, 0)); }).detach();
  if (resolved.wait_until(deadline) == std::future_status::ready) return resolved.get();
  return {{}, "host '" + where.host + "' was not resolved in time"};
}

UniqueFd make_socket(int family) { return UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

void set(int fd, int level, int option, int value) { ::setsockopt(fd, level, option, &value, sizeof(value)); }

/// Returns an empty descriptor, with errno in `code`, on failure.
UniqueFd try_listen(const Endpoint& endpoint, int& code) {
  const int family = endpoint.address.ss_family;
  UniqueFd fd = make_socket(family);
  if (fd) {
    set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
    if (::bind(fd.get(), endpoint.get(), endpoint.length) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  }
  code = errno;
  return {};
}

[[noreturn]] void throw_no_listener(const HostPort& where, int code) {
  const std::string found = "init: TESSERA_MASTER=" + where.text() + ": ";
  if (code == EADDRINUSE)
    throw InvalidUsage(found + "port " + std::to_string(where.port) +
                       " is in use on the host of rank 0; choose another port, or end the run that uses it");
  if (code == EADDRNOTAVAIL)
    throw InvalidUsage(found + "not an address of the host of rank 0; name the host that rank 0 runs on");
  if (code == EACCES) throw InvalidUsage(found + "this user may not listen on this port; choose one above 1023");
  throw system_error(found + "can't listen", code);
}

Endpoint any_address(int family, std::uint16_t port) {
  Endpoint endpoint;
  endpoint.address.ss_family = static_cast<sa_family_t>(family);
  endpoint.length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (family == AF_INET)
    reinterpret_cast<sockaddr_in*>(&endpoint.address)->sin_port = htons(port);
  else
    reinterpret_cast<sockaddr_in6*>(&endpoint.address)->sin6_port = htons(port);
  return endpoint;
}

/// "" if it has none.
std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  return ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? text.data() : "";
}

std::uint16_t port_of(int fd) {
  Endpoint own;
  own.length = sizeof(own.address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own.address), &own.length) != 0)
    throw system_error("init: getsockname");
  return ntohs(own.address.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&own.address)->sin_port
                                                : reinterpret_cast<const sockaddr_in6*>(&own.address)->sin6_port);
}

/// On a loopback interface, a socket that connects to a port without a listener may get that very port as its own and
/// connect to itself.
bool connected_to_itself(int fd) {
  Endpoint own;
  Endpoint peer;
  own.length = peer.length = sizeof(own.address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&own.address), &own.length) == 0 &&
         ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer.address), &peer.length) == 0 &&
         own.length == peer.length && std::memcmp(&own.address, &peer.address, own.length) == 0;
}

/// The addresses of this host's interfaces. An interface without addresses is not among them.
std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw system_error("init: getifaddrs");
  return {first, &::freeifaddrs};
}

int family_of(const ifaddrs& one) { return one.ifa_addr == nullptr ? AF_UNSPEC : one.ifa_addr->sa_family; }

/// "" if it has none.
std::string numeric(const ifaddrs& one) {
  const int family = family_of(one);
  if (family != AF_INET && family != AF_INET6) return "";
  return numeric(one.ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

/// Why a connection to `endpoint` fails.
std::string reason_of(int code, const Endpoint& endpoint) {
  const std::string address = numeric(endpoint.get(), endpoint.length);
  const auto all = interfaces();
  bool own = is_loopback(address);
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) own = own || numeric(*one) == address;
  std::string text = own ? loopback_problem("this rank's host") : "";
  if (!text.empty()) return text;
  text = std::strerror(code);
  if (code == ETIMEDOUT) text += " (does a firewall drop the packets?)";
  if (code == EINVAL || code == EACCES || code == EPERM)
    text += " (does a route or a firewall of this host forbid it? See ip route get " + address + ")";
  return text;
}

UniqueFd connect_endpoint(const Endpoint& endpoint, Deadline deadline, std::string& why) {
  UniqueFd fd = make_socket(endpoint.address.ss_family);
  int code = fd ? 0 : errno;
  if (code == 0 && ::connect(fd.get(), endpoint.get(), endpoint.length) != 0) code = errno;
  if (code == EINPROGRESS) {
    socklen_t length = sizeof(code);
    code = ETIMEDOUT;
    if (wait_ready(fd.get(), POLLOUT, std::min(deadline, steady_clock::now() + kConnectTime)))
      ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &length);
  }
  if (code == 0 && connected_to_itself(fd.get())) code = ECONNREFUSED;
  if (code == 0) return fd;
  why = reason_of(code, endpoint);
  return {};
}

/// A link-local address is one of a link, and only the interface tells which.
void check_scope(const std::string& host, const std::string& found) {
  const std::size_t percent = host.find('%');
  in6_addr address = {};
  if (::inet_pton(AF_INET6, host.substr(0, percent).c_str(), &address) != 1) return;
  if (percent == std::string::npos && IN6_IS_ADDR_LINKLOCAL(&address))
    throw InvalidUsage(found + ": a link-local address needs the interface of this host that leads to it, such as [" +
                       host + "%eth0]; its name may differ on another host");
  if (percent == std::string::npos || resolve_now({host, 1}, AI_NUMERICHOST).error.empty()) return;
  std::set<std::string> names;
  const auto all = interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) names.insert(one->ifa_name);
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "" : ", ") + name;
  throw InvalidUsage(found + ": this host has no interface '" + host.substr(percent + 1) + "'; it has: " + known);
}

constexpr std::string_view kFormat = "tessera-rank0-1";

}  // namespace

std::string loopback_problem(const std::string& host) {
  const auto all = interfaces();
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next)
    if ((one->ifa_flags & IFF_UP) != 0 && is_loopback(numeric(*one))) return "";
  return "the loopback interface of " + host + " is down, by which the ranks on it connect (ip link set lo up)";
}

std::string HostPort::text() const {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

HostPort parse_host_port(const std::string& text, const std::string& what) {
  const auto wrong = [&] {
    return InvalidUsage(what + "=" + text + ": write host:port, such as node7:29400, 10.0.0.1:29400 or [::1]:29400");
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size()) throw wrong();
  HostPort where{text.substr(0, colon), 0};
  if (where.host.front() == '[') {
    if (where.host.back() != ']' || where.host.size() < 3) throw wrong();
    where.host = where.host.substr(1, where.host.size() - 2);
  } else if (where.host.find_first_of(":[]") != std::string::npos) {
    throw wrong();
  }
  if (where.host.find_first_of(" \t/@") != std::string::npos) throw wrong();
  check_scope(where.host, what + "=" + text);
  where.port = static_cast<std::uint16_t>(parse_integer(text.substr(colon + 1), what + ": port", 1, 65535));
  return where;
}

std::vector<UniqueFd> listen_at(const HostPort& where) {
  std::vector<Endpoint> places = resolve_now(where, AI_NUMERICHOST).endpoints;
  const bool numeric = !places.empty();
  if (where.host == "localhost") {
    for (const char* loopback : {"127.0.0.1", "::1"})
      places.push_back(resolve_now({loopback, where.port}, AI_NUMERICHOST).endpoints.at(0));
  } else if (!numeric) {
    places = {any_address(AF_INET, where.port), any_address(AF_INET6, where.port)};
  }
  std::vector<UniqueFd> listeners;
  int code = 0;
  for (const Endpoint& place : places) {
    UniqueFd fd = try_listen(place, code);
    // A host may lack IPv4 or IPv6.
    if (!fd && (numeric || (code != EADDRNOTAVAIL && code != EAFNOSUPPORT))) throw_no_listener(where, code);
    if (fd) listeners.push_back(std::move(fd));
  }
  if (listeners.empty()) throw_no_listener(where, code);
  return listeners;
}

std::vector<UniqueFd> listen_at_free_port(std::vector<HostPort>& places) {
  std::vector<UniqueFd> listeners;
  std::map<int, std::uint16_t> ports;  // by family
  int code = 0;
  for (const int family : {AF_INET, AF_INET6}) {
    UniqueFd fd = try_listen(any_address(family, 0), code);
    if (!fd) continue;  // a host may lack IPv4 or IPv6
    ports[family] = port_of(fd.get());
    listeners.push_back(std::move(fd));
  }
  if (listeners.empty()) throw system_error("init: can't listen", code);
  const auto all = interfaces();
  places.clear();
  std::vector<HostPort> loopback;  // they come last
  for (const ifaddrs* one = all.get(); one != nullptr; one = one->ifa_next) {
    const int family = family_of(*one);
    if ((one->ifa_flags & IFF_UP) == 0 || ports.count(family) == 0) continue;
    const std::string address = numeric(*one);
    // One with a scope is valid only with an interface of the host that uses it.
    if (!address.empty() && address.find('%') == std::string::npos)
      (is_loopback(address) ? loopback : places).push_back({address, ports[family]});
  }
  places.insert(places.end(), loopback.begin(), loopback.end());
  return listeners;
}

Connection connect_at(const HostPort& where, Deadline deadline, std::string& why, std::size_t attempt) {
  const Resolved places = resolve(where, deadline);
  if (places.endpoints.empty()) why = places.error;
  for (std::size_t i = 0; i < places.endpoints.size(); ++i) {
    const Endpoint& endpoint = places.endpoints[(attempt + i) % places.endpoints.size()];
    UniqueFd fd = connect_endpoint(endpoint, deadline, why);
    if (!fd) continue;
    tune(fd.get());
    return Connection(std::move(fd));
  }
  return {};
}

std::string connection_problem(const HostPort& where, Deadline deadline) {
  std::string why;
  if (connect_at(where, deadline, why)) return "";
  return why.empty() ? "no answer in time" : why;
}

std::string own_address(int fd) {
  Endpoint own;
  own.length = sizeof(own.address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own.address), &own.length) != 0 ||
      (own.address.ss_family != AF_INET && own.address.ss_family != AF_INET6))
    return "";
  const std::string address = numeric(own.get(), own.length);
  return address.starts_with("::ffff:") ? address.substr(7) : address;
}

bool is_loopback(const std::string& address) { return address == "::1" || address.starts_with("127."); }

void tune(int fd) {
  if (own_address(fd).empty()) return;
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);  // milliseconds
}

std::string source_of(const sockaddr_storage& address) {
  constexpr std::size_t kNetwork = 8;
  std::string bytes(address.ss_family == AF_INET ? sizeof(in_addr) : address.ss_family == AF_INET6 ? kNetwork : 0, 0);
  const void* const at = address.ss_family == AF_INET
                             ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr)
                             : &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  std::memcpy(bytes.data(), at, bytes.size());
  return bytes;
}

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
