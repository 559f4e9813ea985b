// The control channels of one rank of a running world: its connections in the tree that the ranks form (in a small
// world, a star around rank 0), served by one thread. A rank forwards what is not for it alone.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/control_connection.h"
#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

/// The shape of the connections that carry the control channels. Rank 0 is the root: a star around it is the tree in
/// which all others are its children.
struct TESSERA_API ControlTree {
  int size = 1;
  int fan_out = 1;  ///< children of a rank, at most

  bool is_star() const noexcept { return first_child(1) == size; }
  /// -1 for rank 0.
  int parent(int rank) const noexcept { return rank == 0 ? -1 : (rank - 1) / fan_out; }
  /// The children of `rank` are the ranks from here to first_child(rank + 1).
  int first_child(int rank) const noexcept;
  /// The neighbour of rank `from` that leads to another rank `to`.
  int next_hop(int from, int to) const noexcept;
  /// The ranks between the two, in order.
  std::vector<int> route(int from, int to) const;
};

/// Connects this rank with its neighbours and returns the connections by rank. Collective: the ranks exchange where
/// they listen. All throw the same Error, which names a rank that is missing.
TESSERA_API std::vector<Connection> connect_tree(Bootstrap& ranks, const RankIdentity& self, const ControlTree& tree,
                                                 Deadline deadline);

class ControlPlane {
 public:
  struct Members {
    int rank = 0;
    ControlTree tree;
    std::vector<Connection> links;  ///< by rank; empty, or missing at the end, for those that are no neighbours
    std::vector<int> pids;          ///< by rank; 0 if this rank can't see its process
    std::chrono::milliseconds timeout{};
  };
  /// Starts the thread. While this object lives, no other thread may run `context`, which must outlive it.
  ControlPlane(boost::asio::io_context& context, Members members);
  /// Informs the other ranks that this rank closes normally; waits at most a second for their acknowledgment.
  ~ControlPlane();

  /// Waits until all ranks have opened the channel. Throws PeerLost if a rank died or left, Timeout.
  std::unique_ptr<ControlChannel> open(std::string_view name, ControlEvents events);

 private:
  struct Channel;
  class Handle;
  using ChannelPointer = std::shared_ptr<Channel>;
  struct ChannelOpening {
    std::string name;
    std::set<int> ranks;  ///< this one, and those children whose subtrees have opened it
  };

  // Any thread.
  void send_message(const Channel& channel, int to, std::string_view message);
  void close(const ChannelPointer& channel);
  void send(int to, protocol::Type type, std::string_view payload, int except = -1);
  ChannelPointer find(std::uint16_t number);

  ControlConnection* line(int rank) const noexcept { return lines_[static_cast<std::size_t>(rank)].get(); }
  /// Whether what `neighbour` says of `rank` can come from there.
  bool is_behind(int neighbour, int rank) const noexcept;

  // The context's thread.
  bool on_frame(int from, protocol::Type type, std::string_view payload);
  bool on_message(int from, std::string_view payload);
  bool on_opened(int from, const protocol::ChannelOpened& opened);
  bool on_gone(int from, protocol::Type type, std::string_view payload);
  void opened_by_all(const protocol::ChannelOpened& opened);
  bool on_probe(int from);
  void gone(int rank, bool in_good_order);
  void damaged(int rank);
  void on_end(int rank);
  void judge_ended();
  std::vector<ChannelPointer> break_channels();
  void watch_process(int rank, int pid);
  void await_end(int rank, boost::asio::posix::stream_descriptor& process, boost::asio::steady_timer& timer);
  void leave();
  void stop_when_alone();

  boost::asio::io_context& context_;
  const int rank_;
  const ControlTree tree_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::unique_ptr<ControlConnection>> lines_;  // by rank; null for one that is no neighbour
  std::list<boost::asio::posix::stream_descriptor> processes_;
  std::list<boost::asio::steady_timer> timers_;
  std::map<std::uint16_t, ChannelOpening> openings_;
  std::set<int> gone_;
  std::set<int> ended_;  // ranks that ended; in a star, rank 0 may still have to report how
  bool leaving_ = false;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::map<std::uint16_t, ChannelPointer> channels_;
  std::uint16_t next_channel_ = 0;
  std::string broken_;    // why no further channel can be opened ...
  bool damaged_ = false;  // ... if that is not the end of a rank

  std::thread thread_;
};

}  // namespace tessera::comm
