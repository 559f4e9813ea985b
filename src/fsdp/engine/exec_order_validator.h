// Checks that all ranks run the same units in the same order, on which their collectives rely.
//
// Ranks that gather units of equal size in different orders would receive each other's parameters undetected. So each
// rank hashes what it issued and, at the beginning of a step, exchanges the hash asynchronously. If a rank omits a
// collective, the communicator's timeout names unit and rank.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// One per rank; used by the engine's thread. Every rank makes the same calls of begin() and agree().
class TESSERA_API ExecOrderValidator {
 public:
  /// Collective. `world` outlives it.
  ExecOrderValidator(comm::Communicator& world, base::DeviceRuntime& runtime);

  /// Records that an operation was issued.
  void record(std::string_view what);
  /// Drops the records since the last exchange: the program repeats the step.
  void discard_records();
  /// Starts an exchange of the records since the last one; `next` names what follows. Throws Mismatch if an earlier
  /// exchange has shown a difference, with the text of each rank.
  void begin(const std::string& next);
  /// As begin(), but waits for the other ranks: on return all ranks are known to have called it with the same text and
  /// records.
  void agree(const std::string& next);
  /// Throws Mismatch as begin() does.
  void check();
  /// Whether no exchange is in flight; one that failed is not.
  bool idle() const noexcept;
  void abort(const std::string& reason) noexcept { communicator_->abort(reason); }
  /// Bytes that a rank sends for one begin().
  std::uint64_t formula_bytes() const;
  /// Host collectives over all ranks, for other exchanges.
  comm::HostCollectives& host() { return host_; }

 private:
  struct OrderRecord {
    std::uint64_t hash = 0;
    std::array<char, 248> text = {};
    friend bool operator==(const OrderRecord&, const OrderRecord&) = default;
  };
  /// An exchange in flight.
  struct PendingCheck {
    OrderRecord mine;
    std::vector<OrderRecord> all;
    std::unique_ptr<comm::HostCollectives::AsyncCollective> pending;
  };
  OrderRecord next_record(const std::string& next);
  [[noreturn]] void fail(const std::vector<OrderRecord>& all);

  std::unique_ptr<comm::Communicator> communicator_;
  comm::HostCollectives host_;
  const comm::HostCollectives::Exchange gather_;
  std::uint64_t hash_ = 0;
  std::uint64_t sent_hash_ = 0;                          // hash_ at the last exchange
  std::string text_;                                     // as much text as is exchanged
  std::deque<std::unique_ptr<PendingCheck>> exchanges_;  // oldest first
};

}  // namespace tessera::fsdp
