// Connects one rank to its world: accepts other ranks and connects to them, all concurrently. Either all connections
// are made at once, when the world starts (run()), or each when the first message needs it (serve()).
//
// On demand either of two ranks may begin. If both do, the lower one connects: it refuses the higher one, which then
// accepts. So both ends always agree on which connections they use.
//
// The kernel sizes the sockets' buffers and grows them with the connection; setting a size would disable that and be
// limited to net.core.rmem_max, which is far smaller on most machines.
#pragma once

#include <utility>  // before Asio's coroutines, which forget it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <exception>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backends/tcp/handshake.h"

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

using Endpoint = boost::asio::ip::tcp::endpoint;

/// An authenticated connection.
struct MeshConnection {
  UniqueFd fd;
  SecureStream stream;
  ConnectionKeys keys;
};

/// One thread at a time uses it.
class MeshConnector {
 public:
  /// `tls`: encrypts the connections; null: they are plain. Outlives this object.
  MeshConnector(int rank, int streams, const Bootstrap::Token& token, const TlsContext* tls);

  /// Listens on a port that the system chooses. Throws SystemError.
  Endpoint listen(const Address& address);

  /// Runs until all ranks of `endpoints` are connected and returns "". At the limit, returns the missing ranks and the
  /// reasons.
  std::string run(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit);
  /// Returns the connections that run() made, by rank and stream.
  std::vector<std::vector<MeshConnection>> release_streams();

  /// What has become of the connections to a rank: they, or why they can't be made.
  struct Outcome {
    std::size_t rank = 0;
    std::vector<MeshConnection> streams;
    std::string failure;
  };
  /// Accepts ranks from now on, whenever poll() is called. `limit`: for a connection to a rank that can't be reached; a
  /// rank that can, and does not answer because it computes, is waited for.
  void serve(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit);
  /// A message waits for connections to `rank`. Only the first call for a rank has an effect.
  void want(std::size_t rank);
  /// Continues what can be continued without waiting. Returns each rank once.
  std::vector<Outcome> poll();
  /// True while poll() has more to do than to accept: it must be called again soon.
  bool busy() const noexcept { return handshakes_ > 0 || accepts_later_; }
  /// The listening socket, which is readable when poll() can accept.
  int listener() noexcept { return acceptor_.native_handle(); }

 private:
  using SharedSocket = std::shared_ptr<Socket>;
  struct Connected {
    SharedSocket socket;
    SecureStream stream;
    ConnectionKeys keys;
  };
  enum class Direction : std::uint8_t { none, out, in };
  struct Peer {
    Endpoint endpoint;
    Direction direction = Direction::none;
    bool wanted = false;
    bool finished = false;             ///< its outcome is, or was, among the news
    std::size_t admitted = 0;          ///< of its incoming connections, those whose handshake is not complete
    std::list<SharedSocket> attempts;  ///< the outgoing ones ...
    std::uint32_t round = 0;           ///< ... of this connect()
    std::vector<Connected> done;       ///< by stream
    std::string reason;                ///< why the last attempt failed
    std::chrono::steady_clock::time_point since;

    bool complete() const;
    bool begun() const;
  };
  template <class T>
  using Task = boost::asio::awaitable<T>;

  void begin(const std::vector<Endpoint>& endpoints);
  void start(Task<void> task);
  void connect(std::size_t rank);
  Task<void> accept_ranks();
  Task<void> accept_one(SharedSocket socket);
  Task<void> connect_one(ConnectionId link, std::uint32_t round);
  Task<std::string> try_to_connect(ConnectionId link);
  Task<void> pause(std::chrono::milliseconds time);
  Task<void> pause_accepting(std::chrono::milliseconds time);
  void drop_stranger();
  bool admit(const ConnectionId& link);
  void end_admission(std::size_t rank);
  SecureStream stream_of(Socket& socket, bool server) const;
  void keep(const ConnectionId& link, std::size_t rank, Connected connected);
  void give_up(std::size_t rank);
  std::vector<MeshConnection> release(Peer& peer) const;
  std::string missing(std::chrono::milliseconds limit) const;

  const std::size_t rank_;
  const std::size_t streams_;
  const Bootstrap::Token token_;
  const TlsContext* const tls_;
  const std::size_t most_strangers_;  // in addition to the ranks that run() waits for
  boost::asio::io_context context_{1};
  boost::asio::ip::tcp::acceptor acceptor_{context_};
  std::vector<Peer> peers_;
  std::list<SharedSocket> strangers_;  // accepted but not yet authenticated
  std::minstd_rand random_{std::random_device{}()};
  std::chrono::milliseconds limit_{};
  bool serving_ = false;
  bool accepts_later_ = false;
  std::size_t handshakes_ = 0;  // under way
  std::size_t to_come_ = 0;     // connections that run() waits for
  std::vector<Outcome> news_;
  std::exception_ptr failure_;
};

}  // namespace tessera::comm::tcp
