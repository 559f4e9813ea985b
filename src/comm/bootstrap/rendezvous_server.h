// Rank 0's server for the rendezvous. Any number of peers may connect at once, and none blocks the others: a peer that
// doesn't complete the handshake in time is disconnected, and a rank that belongs to this world simply tries again.
//
// Peers that have proven that they know the key and those that have not have separate places. If all are taken, one
// peer, chosen at random, is dropped: a flood can't foresee which. One source address can't take all places. In a
// complete world only a few peers are looked at each second.
#pragma once

#include <array>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

class TESSERA_API RendezvousServer {
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
  /// "2, 5": the ranks that have not joined, also after accept_all() threw. `shift` is added to their numbers.
  std::string missing(int shift = 0) const;
  void close();
  const Digest& session() const noexcept { return session_; }

 private:
  struct PendingPeer;
  /// A handler of the context that does nothing once the server is closed: what is ready then can't be canceled any
  /// more.
  template <class Handler>
  auto while_open(Handler handler) {
    return [open = std::weak_ptr(open_), handler = std::move(handler)](const boost::system::error_code& error) {
      if (!open.expired()) handler(error);
    };
  }
  using PeerPointer = std::shared_ptr<PendingPeer>;

  struct Listener {
    boost::asio::posix::stream_descriptor socket;
    boost::asio::steady_timer pause;
  };

  void listen(std::size_t listener);
  void listen_later(std::size_t listener);
  void accept_some(std::size_t listener);
  void receive(UniqueFd fd, std::string source, int family);
  void challenge(const PeerPointer& peer);
  void choose_tls(const PeerPointer& peer);
  void start_tls(const PeerPointer& peer);
  void read(const PeerPointer& peer);
  void enter_known(const PeerPointer& peer);
  bool on_hello(const PeerPointer& peer, std::string_view payload);
  void send(const PeerPointer& peer, std::function<void()> then);
  void when_ready(const PeerPointer& peer, SecureStream::State state, std::function<void()> then);
  void note_refusal(bool proven, const std::string& text);
  void await_belief(const PeerPointer& peer);
  std::size_t share() const noexcept;
  const PeerPointer& any_of(const std::vector<PeerPointer>& pool);
  void make_place(const std::string& source);
  void enter(const PeerPointer& peer);
  void leave(const PeerPointer& peer);
  void reject(PeerPointer peer);
  void drop_dead();
  void sweep();
  std::vector<Connection> release_links();
  void refuse_all(const Error& error);

  boost::asio::io_context& context_;
  const RankIdentity self_;
  const std::string about_;
  const Digest session_;
  const std::size_t most_pending_;  // in each of the two
  std::vector<Listener> listeners_;
  boost::asio::steady_timer sweeper_;
  std::array<std::vector<PeerPointer>, 2> pending_;  // in the handshake: [1] have proven that they know the key
  std::map<std::string, std::size_t> sources_;       // of pending_[0]
  std::minstd_rand random_{std::random_device{}()};
  std::vector<PeerPointer> here_;  // by rank
  int joined_ = 0;                 // of here_, those that have confirmed
  bool complete_ = false;
  std::shared_ptr<const char> open_ = std::make_shared<const char>();  // null: closed
  bool sweeping_ = false;
  std::string mismatch_;  // why the world can't be created
  // Why ranks and, last, peers without proof were refused: for a possible error.
  std::array<std::vector<std::string>, 2> refused_;
};

}  // namespace tessera::comm
