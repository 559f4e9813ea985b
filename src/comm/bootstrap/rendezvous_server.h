// Where rank 0 lets the others in. Any number may knock at once, and none has to be waited for: who does not prove
// himself in time, or is one of too many, is shown out, and a rank that belongs here simply knocks again.
#pragma once

#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

class RendezvousServer {
 public:
  using Socket = boost::asio::generic::stream_protocol::socket;

  /// Works on `context`, which outlives it. `about` names the run in errors: "within 5m (run 'x')".
  RendezvousServer(boost::asio::io_context& context, std::vector<UniqueFd> listeners, RankIdentity self,
                   std::string about);
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

  /// Runs the context until all others are here: their connections by rank, [0] empty. Throws Timeout that names who is
  /// missing and who was refused, and InvalidUsage where the ranks don't fit together; those who are here are told the
  /// same. Afterwards, whenever somebody runs the context, latecomers are refused.
  std::vector<Connection> accept_all(Deadline deadline);
  void close();
  const Digest& session() const noexcept { return session_; }

 private:
  struct PendingPeer;
  using GuestPointer = std::shared_ptr<PendingPeer>;

  void listen(std::size_t listener);
  void accept_some(std::size_t listener);
  void receive(UniqueFd fd);
  void read(const GuestPointer& guest);
  bool on_hello(const GuestPointer& guest, std::string_view payload);
  void answer(const GuestPointer& guest);
  void await_belief(const GuestPointer& guest);
  void reject(GuestPointer guest);
  void drop_dead();
  void sweep();
  std::string missing() const;
  std::vector<Connection> take_links();
  void give_up(const Error& error);

  boost::asio::io_context& context_;
  const RankIdentity self_;
  const std::string about_;
  const Digest session_;
  const std::size_t most_strangers_;
  std::vector<boost::asio::posix::stream_descriptor> listeners_;
  boost::asio::steady_timer sweeper_;
  std::list<GuestPointer> strangers_;  // who has not proved himself, the oldest first
  std::vector<GuestPointer> here_;     // by rank
  int joined_ = 0;                     // of here_, those who have heard so
  bool complete_ = false;
  bool sweeping_ = false;
  std::string mismatch_;              // why the world can't come to be
  std::vector<std::string> refused_;  // for the error that may come
};

}  // namespace tessera::comm
