// How a rank learns from shared memory that a peer has failed, died or left, and how far it is.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backends/shm/member_blocks.h"
#include "tessera/comm/failure.h"

namespace tessera::comm::shm {

class SharedPeerMonitor {
 public:
  explicit SharedPeerMonitor(const MemberBlocks& members) : members_(members) {}

  /// True if a peer has published a failure on this communicator. Inline, since every call asks.
  bool any_failure() const noexcept {
    for (int k = 0; k < members_.size(); ++k)
      if (k != members_.rank() && members_.of(k).head().failure.state.load() != 0) return true;
    return false;
  }
  /// The failure that a peer has published on this communicator, if any.
  std::optional<Failure> published_failure() const;
  /// Publishes this rank's failure, which is the first.
  void publish(const Failure& failure) const noexcept;

  /// "died (process 12)"; "" while the peer lives.
  std::string death(int member) const;
  bool has_left(int member) const { return members_.record(member).left.load() != 0; }
  /// Its first failure, if it has left after one.
  std::string first_failure_cause(int member) const { return members_.record(member).first_failure_cause.data(); }

  /// Asks all members for a sign of life. False: the member does not respond in time.
  std::vector<bool> ping_all() const;

 private:
  const MemberBlocks& members_;
};

}  // namespace tessera::comm::shm
