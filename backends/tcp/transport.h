// The TCP transport: messages between ranks.
//
// Two ranks may connect when the first message between them is sent; until then it is queued. A rank accepts
// connections while it polls, as it receives messages.
//
// poll(), send() and receive() read and write the sockets themselves: there is no transport thread, no hand-over
// between threads, and no wake-up per message. frame.h describes the headers and the eager protocol.
#pragma once

#include <memory>

#include "backends/tcp/epoll_waiter.h"
#include "backends/tcp/peer_connection.h"
#include "backends/tcp/tcp_options.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::tcp {

struct ConnectionMesh;

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
