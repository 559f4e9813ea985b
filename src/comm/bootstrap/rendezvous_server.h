// Rank 0's server for the rendezvous. Any number of peers may connect at once, and none blocks the others: a peer that
// doesn't complete the handshake in time, or exceeds the limit, is disconnected, and a rank that belongs to this world
// simply tries again.
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

class RendezvousServer {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  /// Runs on `context`, which must outlive it. `about` names the run in errors: "within 5m (run 'x')".
  RendezvousServer(boost::asio::io_context& context, std::vector<UniqueFd> listeners, RankIdentity self,
                   std::string about);
  ~RendezvousServer();

  /// Runs the context until all others have joined, and returns their connections by rank, [0] empty. Throws Timeout
  /// that names the missing and the refused ranks, and InvalidUsage if the ranks don't match; ranks that have joined
  /// receive the same error. Afterwards late ranks are refused whenever the context runs.
  std::vector<Connection> accept_all(Deadline deadline);
  void close();
  const Digest& session() const noexcept { return session_; }

 private:
  struct PendingPeer;
  using PeerPointer = std::shared_ptr<PendingPeer>;

  void listen(std::size_t listener);
  void accept_some(std::size_t listener);
  void receive(UniqueFd fd);
  void challenge(const PeerPointer& peer);
  void choose_tls(const PeerPointer& peer);
  void start_tls(const PeerPointer& peer);
  void read(const PeerPointer& peer);
  bool on_hello(const PeerPointer& peer, std::string_view payload);
  void send(const PeerPointer& peer, std::function<void()> then);
  void when_ready(const PeerPointer& peer, SecureStream::State state, std::function<void()> then);
  void note_refusal(const std::string& text);
  void await_belief(const PeerPointer& peer);
  void reject(PeerPointer peer);
  void drop_dead();
  void sweep();
  std::string missing() const;
  std::vector<Connection> release_links();
  void refuse_all(const Error& error);

  boost::asio::io_context& context_;
  const RankIdentity self_;
  const std::string about_;
  const Digest session_;
  const std::size_t most_strangers_;
  std::vector<boost::asio::posix::stream_descriptor> listeners_;
  boost::asio::steady_timer sweeper_;
  std::list<PeerPointer> strangers_;  // peers without a completed handshake, the oldest first
  std::vector<PeerPointer> here_;     // by rank
  int joined_ = 0;                    // of here_, those that have confirmed
  bool complete_ = false;
  bool sweeping_ = false;
  std::string mismatch_;              // why the world can't be created
  std::vector<std::string> refused_;  // for a possible error
};

}  // namespace tessera::comm
