// Active messages and bulk data as MPI messages, on a communicator of their own. No MPI call blocks: poll() tests the
// pending requests.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/mpi/collectives.h"
#include "backends/mpi/library.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/link.h"

namespace tessera::comm::mpi {

// MPI offers no event to sleep on, so threads take short naps that grow while nothing happens. A collective of MPI
// advances only while it is tested and does not report its progress: while one is in flight, waiting threads only yield
// the core.

class PollingWaiter final : public ProgressWaiter {
 public:
  PollingWaiter();
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  /// Progress was made: the next nap is short. Under the engine's lock.
  void on_progress() noexcept {
    naps_ = 0;
    waiting_since_ = {};
  }
  /// Sets whether a collective of MPI is in flight. Under the engine's lock.
  void set_collective_in_flight(bool on) noexcept {
    collective_in_flight_ = on;
    if (!on) waiting_since_ = {};
  }

 private:
  UniqueFd wake_fd_;
  std::atomic<int> naps_{0};  ///< consecutive naps
  bool collective_in_flight_ = false;
  Clock::time_point waiting_since_;  ///< since threads wait
  std::atomic<bool> yields_{false};
};

class MpiLink final : public Link {
 public:
  /// Collective; throws as open_ranks().
  MpiLink(Bootstrap& bootstrap, TransportEvents& world, LinkEvents& events, std::chrono::milliseconds timeout,
          std::size_t max_chunk);
  ~MpiLink() override { close(CloseMode::abortive); }

  std::size_t longest_payload() const noexcept override { return kMaxPayload; }
  bool can_send_eager() const noexcept override { return sending_.size() < kMaxAms; }
  void send_am(int peer, const AmHeader& header, std::span<const std::byte> payload) noexcept override;
  void send_bulk(Message& message, std::uint64_t slot) noexcept override { start_bulk(message, slot, false); }
  void receive_bulk(Message& message, std::uint64_t slot) noexcept override { start_bulk(message, slot, true); }
  CancelResult cancel_bulk(Message& message) noexcept override;
  bool poll(bool with_health_check) noexcept override;
  ProgressWaiter& waiter() noexcept override { return waiter_; }
  NativeCollectives* native() noexcept override { return &collectives_; }
  void close(CloseMode how) noexcept override;

 private:
  // With its header and MPI's own, it fits into the 4 KiB that Open MPI sends at once in shared memory.
  static constexpr std::size_t kMaxPayload = 3968;
  static constexpr std::size_t kMaxAms = 1024;
  static constexpr std::size_t kReceives = 64;  ///< posted for active messages; MPI buffers further ones

  struct AmBuffer {
    AmHeader header;
    std::byte payload[kMaxPayload];
  };
  struct BulkTransfer {
    Message* message = nullptr;
    std::uint64_t slot = 0;
    std::size_t moved = 0;  ///< in completed parts
    std::size_t part = 0;   ///< bytes in flight
    bool receives = false;
  };

  void post_receive(std::size_t at) noexcept;
  void start_bulk(Message& message, std::uint64_t slot, bool receives) noexcept;
  MPI_Request start_part(BulkTransfer& bulk) noexcept;
  bool receive_ams() noexcept;
  void retire_ams() noexcept;
  bool move_bulk() noexcept;
  void remove_bulk(std::size_t at) noexcept;
  bool good(int code) noexcept;
  void fail(const std::string& why) noexcept;
  void stop() noexcept;
  bool end_request(MPI_Request& request, MPI_Status& status, Clock::time_point until) noexcept;

  LinkEvents& events_;
  const int rank_;
  const std::size_t max_chunk_;  ///< of bulk, in bytes: a count of MPI is an int
  Ranks ranks_;
  PollingWaiter waiter_;
  MpiCollectives collectives_;
  std::unique_ptr<std::array<AmBuffer, kReceives>> arriving_;  ///< a ring: MPI fills them in the order they were posted
  std::array<MPI_Request, kReceives> receives_;
  std::size_t next_receive_ = 0;
  std::vector<std::unique_ptr<AmBuffer>> sending_;
  std::vector<MPI_Request> sends_;  ///< of `sending_`
  std::vector<std::unique_ptr<AmBuffer>> free_;
  std::vector<BulkTransfer> bulk_;
  std::vector<MPI_Request> bulk_requests_;  ///< of `bulk_`
  std::vector<int> done_;                   ///< space for MPI_Testsome
  std::string failure_;
  bool closed_ = false;
};

/// The transport over this link, for the communicator and for tests of the bare transport. Collective. One MPI call
/// moves at most `max_chunk` bytes (tests: a few). Throws InvalidUsage, BackendError, Timeout, and what the bootstrap
/// throws.
std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                          std::chrono::milliseconds timeout, std::size_t max_chunk = kMaxChunk);

}  // namespace tessera::comm::mpi
