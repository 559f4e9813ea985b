// The TCP transport: messages between ranks.
//
// Two ranks may connect when the first message between them is sent; until then it is queued. A rank accepts
// connections while it polls, as it receives messages.
//
// poll(), send() and receive() read and write the sockets themselves: there is no transport thread, no hand-over
// between threads, and no wake-up per message. frame.h describes the headers and the eager protocol.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/tcp/mesh_connector.h"
#include "backends/tcp/peer_connection.h"
#include "backends/tcp/tcp_options.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::tcp {

/// Puts threads of a rank to sleep until a socket is ready.
class EpollWaiter final : public ProgressWaiter {
 public:
  EpollWaiter();  ///< throws SystemError
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;

  /// Sleep at most a millisecond at a time, since more is awaited than the events of the set.
  void keep_short(bool on) noexcept { short_.store(on); }
  /// The set of sockets whose events end a sleep.
  int epoll() const noexcept { return epoll_.get(); }

 private:
  void signal() noexcept;

  const UniqueFd epoll_;
  const UniqueFd woken_;  // an eventfd: readable from wake() until no thread sleeps any more
  std::atomic<std::uint32_t> wakes_{0};
  std::atomic<std::uint32_t> sleeping_{0};
  std::atomic<bool> short_{false};
};

/// The connections between all ranks of a world.
struct ConnectionMesh {
  std::unique_ptr<MeshConnector> connector;              ///< makes the connections on demand; null: all are made
  std::vector<std::vector<MeshConnection>> connections;  ///< by rank and stream; empty for the rank itself
  std::vector<FrameCodes> codes;                         ///< by rank: of the frames in both directions
  std::string address;                                   ///< the address that this rank listens on
};

/// Collective. Every rank listens on a port of its own and publishes it through the bootstrap; if the settings connect
/// at the start, the lower of two ranks then connects to the higher. Both ends of a connection authenticate with the
/// world's token; a connection that fails this is closed and does not disturb the ranks. `tls`: encrypts them; may be
/// null. Throws InvalidUsage (a rank's settings; on all ranks), Timeout naming the unreachable ranks, PeerLost,
/// SystemError.
ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout,
                            const TlsContext* tls);

class TcpTransport final : public Transport {
 public:
  TcpTransport(int rank, ConnectionMesh mesh, TransportEvents& events);
  bool poll(bool with_health_check) noexcept override;
  void send(Message& message) noexcept override;
  void receive(Message& message) noexcept override;
  bool arrived(int peer, const MessageTag& tag) noexcept override;
  bool knows_arrivals() const noexcept override { return true; }
  void cancel(Message& message) noexcept override;
  void discard_communicator(std::uint32_t communicator) noexcept override;
  ProgressWaiter& waiter() noexcept override { return waiter_; }
  void close(bool failed) noexcept override;

  /// The peer at the other end, for tests; null for this rank.
  PeerConnection* peer(int rank) noexcept { return peers_[static_cast<std::size_t>(rank)].get(); }

 private:
  template <class F>
  void guarded(F&& call) noexcept;
  PeerConnection* peer_of(const Message& message) noexcept;
  void connect(std::size_t rank, std::vector<MeshConnection> connections);
  bool connect_more();
  bool read_ready();
  bool read_all();
  bool may_go() const noexcept;
  void report_losses() noexcept;

  const int rank_;
  TransportEvents& events_;
  boost::asio::io_context context_{1};  // never run: the sockets are only read and written directly
  EpollWaiter waiter_;
  std::unique_ptr<MeshConnector> connector_;  // null: all ranks are connected
  bool can_accept_ = true;
  std::vector<std::unique_ptr<PeerConnection>> peers_;
  std::vector<std::size_t> connected_;  // of peers_, for loops that are run at each call
  std::vector<TcpStream*> streams_;
  std::vector<bool> reported_;
  bool first_poll_ = true;
  bool failed_ = false;
};

/// Collective. Reads the settings from the environment. `events` outlives the transport. Throws as connect_mesh(); no
/// wait exceeds options.communicator.timeout.
std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events, const BackendOptions& options);
std::unique_ptr<TcpTransport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                             const BackendOptions& options, const TcpOptions& settings);

}  // namespace tessera::comm::tcp
