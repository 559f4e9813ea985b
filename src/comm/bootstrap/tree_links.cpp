#include "tessera/comm/bootstrap/control_plane.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <cstdint>

#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/process_bootstrap.h"

namespace tessera::comm {
namespace {

/// The identity of a rank in the world of `parent`, which is its rank 0, and its children.
RankIdentity member_of(RankIdentity self, const Bootstrap::Token& token, const ControlTree& tree, int parent) {
  const int first = tree.first_child(parent);
  self.size = tree.first_child(parent + 1) - first + 1;
  self.rank = self.rank == parent ? 0 : self.rank - first + 1;
  self.key = prove(token, "tree" + std::to_string(parent));
  return self;
}

std::vector<UniqueFd> listen(const Bootstrap& ranks, PublishedAddress& address) {
  const auto& hosts = ranks.hosts();
  std::vector<UniqueFd> listeners;
  if (std::ranges::adjacent_find(hosts, std::not_equal_to<>()) == hosts.end()) {
    address.socket = "tessera-" + to_hex(random_digest()).substr(0, 32);
    listeners.push_back(listen_on(address.socket));
  } else {
    listeners = listen_for_all("", address);
    // First the one by which rank 0's host is reached.
    std::ranges::stable_partition(address.places,
                                  [&](const HostPort& one) { return one.host == ranks.local_address(); });
  }
  return listeners;
}

Connection connect_to_parent(const RankIdentity& member, const PublishedAddress& address, JoinPlan plan) {
  std::size_t attempt = 0;
  const auto connect = [&](std::string& why, Digest&) {
    Connection connection = connect_to(address.socket);  // if it is on this host
    if (!connection && address.places.empty()) why = "no answer at its socket on this host";
    if (connection || address.places.empty()) return connection;
    return connect_at_place(address, attempt++, plan.deadline, why);
  };
  return connect_to_rank0(member, plan, connect).link;
}

/// The connections of the children, after an empty one.
std::vector<Connection> accept_children(const RankIdentity& member, std::vector<UniqueFd> listeners, int first,
                                        Deadline deadline) {
  boost::asio::io_context context(1);
  RendezvousServer server(context, std::move(listeners), member, "");
  try {
    return server.accept_all(deadline);
  } catch (const Timeout&) {
    throw Timeout("init: rank " + server.missing(first - 1) +
                  " did not connect to this one, which forwards control messages, in time");
  }
}

}  // namespace

std::vector<Connection> connect_tree(Bootstrap& ranks, const RankIdentity& self, const ControlTree& tree,
                                     Deadline deadline) {
  const auto now = std::chrono::steady_clock::now();
  const Deadline until = now + (deadline - now) * 3 / 4;  // the rest is for the report
  const int first = tree.first_child(self.rank);
  const int parent = tree.parent(self.rank);
  const bool has_children = first < tree.first_child(self.rank + 1);
  std::vector<UniqueFd> listeners;
  const std::vector<std::string> addresses = exchange(ranks, [&] {
    PublishedAddress own;
    if (has_children) listeners = listen(ranks, own);
    return has_children ? own.text() : "";
  });
  std::vector<Connection> links(static_cast<std::size_t>(tree.size));
  exchange(ranks, [&] {
    if (parent >= 0) {
      const std::string subject = "init: rank " + std::to_string(self.rank) + " of " + std::to_string(tree.size) +
                                  " found no rank " + std::to_string(parent);
      links[static_cast<std::size_t>(parent)] = connect_to_parent(
          member_of(self, ranks.token(), tree, parent),
          PublishedAddress::parse(addresses[static_cast<std::size_t>(parent)]),
          {.place = "its published address", .about = "in time", .deadline = until, .subject = subject});
    }
    if (!has_children) return std::string();
    std::vector<Connection> children =
        accept_children(member_of(self, ranks.token(), tree, self.rank), std::move(listeners), first, until);
    for (std::size_t i = 1; i < children.size(); ++i)
      links[static_cast<std::size_t>(first) + i - 1] = std::move(children[i]);
    return std::string();
  });
  return links;
}

int ControlTree::first_child(int rank) const noexcept {
  return static_cast<int>(std::min<std::int64_t>(size, std::int64_t{fan_out} * rank + 1));
}

int ControlTree::next_hop(int from, int to) const noexcept {
  while (to > from && parent(to) != from) to = parent(to);  // a parent's number is smaller
  return to > from ? to : parent(from);
}

std::vector<int> ControlTree::route(int from, int to) const {
  std::vector<int> between;
  for (int rank = from; rank != to;) {
    rank = next_hop(rank, to);
    if (rank != to) between.push_back(rank);
  }
  return between;
}

}  // namespace tessera::comm
