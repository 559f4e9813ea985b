// One operation in flight: a state machine that the progress engine advances.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/shm/collective_layout.h"
#include "backends/shm/member_blocks.h"
#include "backends/shm/store_choice.h"
#include "tessera/comm/core/operation.h"

namespace tessera::comm::shm {

class ShmOperation final : public Operation {
 public:
  enum class Stage : std::uint8_t { queued, announced, running, draining, done };

  explicit ShmOperation(const MemberBlocks& members) : layout(members.rank(), members.size()) {}
  void reset(const OpDesc& what, std::uint64_t number, bool all_inputs = false);

  std::uint64_t rounds_for(std::size_t count) const;
  std::uint64_t rounds_sent() const;  ///< until every reader has its data from this rank
  bool fills() const { return stages_in || copied_in; }
  /// Peers read memory of the caller or tiles, which stay valid only until the operation is done.
  bool awaits_readers() const { return (layout.sends_input() && !copied_in) || (layout.second_half() && !copied_out); }
  /// A small operation is done once the ranks that it reads from have arrived.
  bool awaits(int peer) const { return everyone || layout.read_slice(peer).count > 0; }
  /// Copies what peers read of this rank's input to the same places in `to`.
  void copy_sent(std::byte* to, StoreChoice& stores) const;

  CollectiveLayout layout;
  std::uint64_t fingerprint = 0;
  Stage stage = Stage::queued;
  bool eager = false;
  bool everyone = false;  ///< done only when all ranks have arrived
  bool stages_in = false;
  bool cma_in = false;      ///< peers read the input from this process
  bool cma_out = false;     ///< ... or the results of the first half
  bool copied_in = false;   ///< peers read a copy of the input
  bool copied_out = false;  ///< ... or of the results of the first half
  bool stages_out = false;
  bool any_staged = false;
  bool any_awaits = false;  ///< a peer waits until this rank has read
  bool streaming = false;
  int arrived = 0;            ///< ranks 0 .. arrived - 1 have arrived
  std::uint64_t staged = 0;   ///< rounds
  std::uint64_t reduced = 0;  ///< rounds
  std::uint64_t round_bytes = 0;
  std::vector<std::uint64_t> copied_inputs;   ///< rounds, by source
  std::vector<std::uint64_t> copied_results;  ///< rounds, by source
};

}  // namespace tessera::comm::shm
