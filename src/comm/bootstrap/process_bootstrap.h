// The processes of a world around rank 0: exchanges while it is set up, control channels afterwards.
#pragma once

#include <boost/asio/io_context.hpp>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/log.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/control_plane.h"
#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/rendezvous_server.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

class ProcessBootstrap final : public Bootstrap {
 public:
  struct StarSockets {
    RankIdentity self;
    std::unique_ptr<boost::asio::io_context> context;
    std::unique_ptr<RendezvousServer> server;  ///< rank 0's; open as long as the bootstrap if late ranks can find it
    std::vector<Connection> links;             ///< rank 0: one per rank, its own empty; otherwise only [0]
    Digest session{};
    ControlTree tree;
    std::string host_id;  ///< "": from the system
    Deadline deadline;
    std::chrono::milliseconds timeout{};
  };
  /// Collective: the ranks exchange where they run.
  explicit ProcessBootstrap(StarSockets parts);
  ~ProcessBootstrap() override;

  int rank() const noexcept override { return self_.rank; }
  int size() const noexcept override { return self_.size; }
  bool in_process() const noexcept override { return false; }
  std::vector<std::string> all_gather(std::string_view blob) override;
  void all_gather_fds(std::span<const int> fds, const UseDescriptors& use) override;
  std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) override;
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return local_address_; }
  std::vector<int> route(int to) const override { return tree_.route(rank(), to); }

 private:
  struct PeerLocation;
  void introduce(const std::string& host_id);
  void separate_hosts(std::vector<PeerLocation>& all, const std::function<std::string(int rank)>& socket_of);
  std::string link_address() const;
  std::vector<Connection>& descriptor_links();
  std::vector<UniqueFd> gather_batch(std::span<const int> own, int first, std::string& counts);
  std::vector<Connection> connect_local_ranks();
  std::vector<std::string> exchange_with_first(std::string_view blob);
  template <class F>
  void each_peer(std::vector<Connection>& links, F&& call);

  const RankIdentity self_;
  const Token token_;
  const ControlTree tree_;
  const Deadline deadline_;
  const std::chrono::milliseconds timeout_;
  std::unique_ptr<boost::asio::io_context> context_;
  std::unique_ptr<RendezvousServer> server_;
  std::vector<Connection> links_;
  std::vector<Connection> local_links_;  // if links_ can't carry descriptors
  std::vector<Connection> tree_links_;   // by rank; empty in a star
  std::vector<std::string> hosts_;
  std::vector<int> pids_;
  std::string local_address_;
  std::unique_ptr<ControlPlane> switchboard_;
};

/// Where a rank looks for rank 0, and until when.
struct JoinPlan {
  std::string place;  ///< for errors, as `about`: "within 5m (run 'x')"
  std::string about;
  Deadline deadline;
  std::shared_ptr<Logger> logger = nullptr;
  std::string subject = "";  ///< of errors; "": "rank 2 of 4 found no rank 0"
};
struct JoinResult {
  Connection link;
  Digest session{};
  Digest key{};  ///< by which rank 0 admitted this rank
};
/// Connects to rank 0 and runs the handshake, with retries until the deadline: a peer that doesn't prove that it knows
/// the key can't end the search, and is logged if it goes on answering. `connect` returns an empty connection, with the
/// reason, if nothing listens yet. Throws Timeout, which tells what answered, and InvalidUsage if rank 0 refuses.
JoinResult connect_to_rank0(const RankIdentity& self, const JoinPlan& plan,
                            const std::function<Connection(std::string& why, Digest& key)>& connect);

}  // namespace tessera::comm
