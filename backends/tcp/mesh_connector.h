// Connects one rank to its world: accepts the lower ranks and connects to the higher ones, all concurrently.
//
// The kernel sizes the sockets' buffers and grows them with the connection; setting a size would disable that and be
// limited to net.core.rmem_max, which is far smaller on most machines.
#pragma once

#include <utility>  // before Asio's coroutines, which forget it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <exception>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/tcp/handshake.h"
#include "backends/tcp/interface.h"

namespace tessera::comm::tcp {

using Endpoint = boost::asio::ip::tcp::endpoint;

/// An authenticated connection.
struct MeshConnection {
  UniqueFd fd;
  SecureStream stream;
  ConnectionKeys keys;
};

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

 private:
  using SharedSocket = std::shared_ptr<Socket>;
  struct Connected {
    SharedSocket socket;
    SecureStream stream;
    ConnectionKeys keys;
  };
  template <class T>
  using Task = boost::asio::awaitable<T>;

  void start(Task<void> task);
  Task<void> accept_ranks(const std::vector<Endpoint>& endpoints);
  Task<void> accept_one(SharedSocket socket);
  Task<void> connect_one(ConnectionId link, Endpoint endpoint);
  Task<std::string> try_to_connect(ConnectionId link, Endpoint endpoint);
  Task<void> pause(std::chrono::milliseconds time);
  void drop_stranger(const std::vector<Endpoint>& endpoints);
  bool belongs(const ConnectionId& link) const;
  SecureStream stream_of(Socket& socket, bool server) const;
  void keep(std::size_t rank, Connected connected, std::size_t stream);
  std::string missing(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit) const;

  const std::size_t rank_;
  const std::size_t streams_;
  const Bootstrap::Token token_;
  const TlsContext* const tls_;
  const std::size_t most_strangers_;  // in addition to the ranks not yet connected
  boost::asio::io_context context_{1};
  boost::asio::ip::tcp::acceptor acceptor_{context_};
  std::vector<std::vector<Connected>> done_;
  std::vector<std::string> reasons_;   // by rank: why the last attempt failed
  std::list<SharedSocket> strangers_;  // accepted but not yet authenticated
  std::minstd_rand random_{std::random_device{}()};
  std::size_t to_come_ = 0;
  std::exception_ptr failure_;
};

}  // namespace tessera::comm::tcp
