// Notes as active messages, bulk as tagged messages of UCX: one context and one worker per rank, no thread of its own.
// Whatever UCX_* variables the user has set hold.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>
#include <vector>

#include "backends/ucx/base.h"
#include "backends/ucx/sleeper.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/wire.h"

namespace tessera::ucx {

/// Whether UCX_TLS leaves it shared memory ("all", "sm,self", "^ib").
bool may_share_memory();

class UcxWire final : public Wire {
 public:
  /// Collective. Throws BackendError, and what the bootstrap throws.
  UcxWire(Bootstrap& bootstrap, WireEvents& events);
  ~UcxWire() override;
  UcxWire(const UcxWire&) = delete;
  UcxWire& operator=(const UcxWire&) = delete;

  std::size_t longest_payload() const noexcept override { return kLongestPayload; }
  bool has_room() const noexcept override { return pending_notes_ < kMostNotes; }
  void send_note(int peer, const NoteHeader& header, std::span<const std::byte> payload) noexcept override;
  void send_bulk(Message& message, std::uint64_t slot) noexcept override;
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override;
  Cancelled cancel_bulk(Message& message) noexcept override;
  bool poll(bool thorough) noexcept override;
  Sleeper& sleeper() noexcept override { return *sleeper_; }
  void close(Ending how) noexcept override;

 private:
  // With its header it fits into one segment of shared memory (8256 bytes) and of TCP.
  static constexpr std::size_t kLongestPayload = 16384;
  static constexpr int kMostNotes = 1024;

  struct Note {
    UcxWire* wire;
    Note* next;  ///< free ones
    NoteHeader header;
    std::byte payload[kLongestPayload];
  };

  struct Peer {
    UcxWire* wire = nullptr;
    int rank = 0;
    ucp_ep_h endpoint = nullptr;  ///< null: given up
  };
  struct Bulk {  ///< what Message::handle points at
    UcxWire* wire = nullptr;
    Message* message = nullptr;
    void* request = nullptr;
    bool receives = false;
    Bulk* next = nullptr;  ///< free ones
  };

  void make_worker();
  void connect(Bootstrap& bootstrap);
  void destroy() noexcept;
  /// Waits, bounded, until they are closed.
  void close_endpoints(std::span<Peer> peers, unsigned flags) noexcept;
  template <class Done>
  bool progress_until(Clock::time_point until, Done done) noexcept;
  Note* take_note();
  Bulk& take_bulk(Message& message, bool receives);
  void started(Bulk& bulk, ucs_status_ptr_t request) noexcept;
  void bulk_ended(Bulk& bulk, ucs_status_t status) noexcept;

  static ucs_status_t on_note(void* self, const void* header, std::size_t header_length, void* data, std::size_t length,
                              const ucp_am_recv_param_t* param);
  static void on_peer_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);
  static void on_note_sent(void* request, ucs_status_t status, void* note);
  static void on_bulk_sent(void* request, ucs_status_t status, void* bulk);
  static void on_bulk_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* bulk);

  WireEvents& events_;
  const int rank_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::vector<Peer> peers_;
  std::unique_ptr<WorkerSleeper> sleeper_;
  std::vector<std::unique_ptr<Note>> notes_;
  Note* free_notes_ = nullptr;
  int pending_notes_ = 0;
  int unsent_ = 0;  ///< notes and bulk that UCX has not sent yet
  std::vector<std::unique_ptr<Bulk>> bulks_;
  Bulk* free_bulks_ = nullptr;
  Message* cancelling_ = nullptr;
  ucs_status_t cancelled_as_ = UCS_OK;
};

}  // namespace tessera::ucx
