// Whether all ranks run the same units in the same order, which their collectives rely on.
//
// Ranks that gather equal units in another order get each other's parameters, and nothing else would notice. So each
// rank keeps a hash of what it issued, and at the beginning of a step tells it to the others; nobody waits for it. A
// rank that left out a collective is found by the communicator's own deadline, which names unit and rank.
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

/// One rank's; used by the engine's thread. Every rank calls begin() and agree() alike.
class TESSERA_API ExecOrderValidator {
 public:
  /// Collective. `world` outlives it.
  ExecOrderValidator(comm::Communicator& world, base::DeviceRuntime& runtime);

  /// Something was issued.
  void note(std::string_view what);
  /// What was noted since the last time is forgotten: the program does it again.
  void forget();
  /// Tells the others what was noted since the last time, on the way to `next`. Throws Mismatch where an earlier one of
  /// these is known to differ, with what each rank told.
  void begin(const std::string& next);
  /// The same, but waits for what the others tell: afterwards all ranks are known to have called it with this text.
  void agree(const std::string& next);
  /// Throws Mismatch as begin() does.
  void check();
  /// Bytes that a rank sends for one begin().
  std::uint64_t formula_bytes() const;
  /// Of all ranks, for what else they must tell each other.
  comm::HostCollectives& host() { return host_; }

 private:
  struct OrderRecord {
    std::uint64_t hash = 0;
    std::array<char, 248> text = {};
    friend bool operator==(const OrderRecord&, const OrderRecord&) = default;
  };
  /// On its way.
  struct PendingCheck {
    OrderRecord mine;
    std::vector<OrderRecord> all;
    std::unique_ptr<comm::HostCollectives::AsyncCollective> pending;
  };
  OrderRecord take(const std::string& next);
  [[noreturn]] void fail(const std::vector<OrderRecord>& all);

  std::unique_ptr<comm::Communicator> communicator_;
  comm::HostCollectives host_;
  const comm::HostCollectives::Exchange gather_;
  std::uint64_t hash_ = 0;
  std::uint64_t told_hash_ = 0;                          // hash_ when the others were told last
  std::string noted_;                                    // as much as is told
  std::deque<std::unique_ptr<PendingCheck>> exchanges_;  // oldest first
};

}  // namespace tessera::fsdp
