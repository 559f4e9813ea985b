// Active messages, and bulk data as tagged messages, of UCX: one context and one worker per rank, no thread of its own.
// UCX_* variables set by the user apply.
#pragma once

#include <ucp/api/ucp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/link.h"

namespace tessera::comm::ucx {

/// Sleeps until data arrives at a worker or wake() is called.
class UcpWaiter final : public ProgressWaiter {
 public:
  /// The worker outlives the waiter, or stop() is called before. `unsent` counts what the worker still has to send: UCX
  /// gives no wake-up when it could continue.
  UcpWaiter(ucp_worker_h worker, const int& unsent);
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  void stop() noexcept { worker_ = nullptr; }

 private:
  ucp_worker_h worker_;
  const int& unsent_;
  std::atomic<bool> nap_{false};
  int worker_fd_ = -1;  ///< the worker's
  UniqueFd wake_fd_;
};

/// Whether UCX_TLS permits shared memory ("all", "sm,self", "^ib").
bool may_share_memory();

class UcxLink final : public Link {
 public:
  /// Collective. Throws BackendError, and what the bootstrap throws.
  UcxLink(Bootstrap& bootstrap, LinkEvents& events);
  ~UcxLink() override { destroy(); }

  std::size_t longest_payload() const noexcept override { return kMaxPayload; }
  bool can_send_eager() const noexcept override { return pending_ams_ < kMaxAms; }
  void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept override;
  void send_bulk(Message& message, std::uint64_t slot) noexcept override;
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override;
  CancelResult cancel_bulk(Message& message) noexcept override;
  bool poll(bool with_health_check) noexcept override;
  ProgressWaiter& waiter() noexcept override { return *waiter_; }
  void close(CloseMode how) noexcept override;

 private:
  // UCX sends more than one segment of shared memory (8256 bytes) as several; up to 16 KiB that is faster than bulk.
  static constexpr std::size_t kMaxPayload = 16384;
  static constexpr int kMaxAms = 1024;

  struct AmBuffer {
    UcxLink* link;
    AmBuffer* next;  ///< next free one
    AmHeader header;
    std::byte payload[kMaxPayload];
  };

  struct UcpPeer {
    UcxLink* link = nullptr;
    int rank = 0;
    ucp_ep_h endpoint = nullptr;  ///< null: abandoned
  };
  struct BulkTransfer {  ///< what Message::handle points at
    UcxLink* link = nullptr;
    Message* message = nullptr;
    void* request = nullptr;
    bool receives = false;
    BulkTransfer* next = nullptr;  ///< next free one
  };

  void make_worker();
  void connect(Bootstrap& bootstrap);
  void destroy() noexcept;
  /// Closes the endpoints and waits, bounded, for completion.
  void close_endpoints(std::span<UcpPeer> peers, unsigned flags) noexcept;
  template <class Done>
  bool progress_until(Clock::time_point until, Done done) noexcept;
  AmBuffer* acquire_am();
  BulkTransfer& acquire_bulk(Message& message, bool receives);
  void started(BulkTransfer& bulk, ucs_status_ptr_t request) noexcept;
  void bulk_ended(BulkTransfer& bulk, ucs_status_t status) noexcept;

  static ucs_status_t on_am(void* self, const void* header, std::size_t header_length, void* data, std::size_t length,
                            const ucp_am_recv_param_t* param);
  static void on_peer_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  static void on_am_sent(void* request, ucs_status_t status, void* am);
  static void on_bulk_sent(void* request, ucs_status_t status, void* bulk);
  static void on_bulk_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* bulk);

  LinkEvents& events_;
  const int rank_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<UcpPeer> peers_;
  std::unique_ptr<UcpWaiter> waiter_;
  std::vector<std::unique_ptr<AmBuffer>> ams_;
  AmBuffer* free_ams_ = nullptr;
  int pending_ams_ = 0;
  int unsent_ = 0;  ///< active messages and bulk that UCX has not sent yet
  std::vector<std::unique_ptr<BulkTransfer>> bulks_;
  BulkTransfer* free_bulks_ = nullptr;
  Message* cancelling_ = nullptr;
  ucs_status_t cancelled_as_ = UCS_OK;
};

/// The transport over this link, for the communicator and for tests of the bare transport. Collective. Throws
/// BackendError, and what the bootstrap throws.
std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events);

}  // namespace tessera::comm::ucx
