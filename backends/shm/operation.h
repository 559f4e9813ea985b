// One operation in flight: a state machine that the progress engine advances.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/shm/control_block.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/driven_work.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::shm {

class ShmGroup;

class ShmOperation final : public DrivenWork {
 public:
  enum class Stage : std::uint8_t { queued, announced, running, draining };
  void prepare(std::shared_ptr<ShmGroup> owner, const OpDesc& what);
  void set_deadline() noexcept { deadline.store(Clock::now() + call.timeout, std::memory_order_relaxed); }

  // The layout of the buffers, in elements. `me` and `ranks` are those of the group.
  bool shares_input() const;                    ///< all readers read the same part of this rank's input
  bool reduces() const;                         ///< readers combine the sources; else they copy them
  Slice read_slice(int source) const;           ///< what this rank reads from the input of `source`
  Slice sent_slice(int reader) const;           ///< what `reader` reads of this rank's input
  std::size_t output_offset(int source) const;  ///< where the data of `source` goes in this rank's output
  Slice owned_slice(int owner) const;           ///< all_reduce: what `owner` computes
  bool second_half() const { return call.kind == OpKind::all_reduce && !symmetric; }
  /// Bytes that decide between the eager and the tiled algorithm; the same on all ranks. None: always tiled.
  std::size_t eager_size() const;
  bool sends_input() const;  ///< peers read this rank's input
  std::uint64_t rounds_for(std::size_t count) const;
  std::uint64_t rounds_given() const;  ///< until every reader has its data from this rank
  bool fills() const { return stages_in || copied_in; }
  /// Peers read memory of the caller or tiles, which stay valid only until the operation is done.
  bool awaits_readers() const { return (sends_input() && !copied_in) || (second_half() && !copied_out); }
  /// A small operation is done once the ranks that it reads from have arrived.
  bool awaits(int peer) const { return everyone || read_slice(peer).count > 0; }
  std::uint64_t make_fingerprint() const;
  std::uint64_t table_count() const;
  bool ragged() const { return !in_starts.empty() || !out_starts.empty(); }

  std::shared_ptr<ShmGroup> group;  ///< while in use
  OpDesc call;
  std::vector<std::size_t> in_starts;  ///< the _v forms: size + 1 offsets
  std::vector<std::size_t> out_starts;
  int me = 0;
  int ranks = 1;
  std::uint64_t sequence = 0;
  std::uint64_t fingerprint = 0;
  /// Set only if a call does not finish at once: most do, and reading the clock takes a tenth of a small call.
  std::atomic<Clock::time_point> deadline;
  Stage stage = Stage::queued;
  bool eager = false;
  bool small = false;      ///< may finish inside its call
  bool symmetric = false;  ///< all_reduce in which every rank reads all inputs
  bool internal = false;   ///< not metered
  bool everyone = false;   ///< done only when all ranks have arrived
  bool stages_in = false;
  bool remote_in = false;   ///< peers read the input from this process
  bool remote_out = false;  ///< ... or the results of the first half
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
  std::vector<std::uint64_t> taken_a;  ///< rounds copied, by source
  std::vector<std::uint64_t> taken_b;
  ShmOperation* parent = nullptr;  ///< of an operation in a batch
  std::uint32_t parts_left = 0;
  ShmOperation* next = nullptr;

 protected:
  ProgressEngine& engine() const noexcept override;
  [[noreturn]] void throw_failure() const override;
  void recycle() noexcept override;
};

/// A queue of operations, linked through them.
struct OpQueue {
  ShmOperation* head = nullptr;
  ShmOperation* tail = nullptr;
  bool empty() const { return head == nullptr; }
  void push(ShmOperation& op) {
    op.next = nullptr;
    (tail == nullptr ? head : tail->next) = &op;
    tail = &op;
  }
  ShmOperation& pop() {
    ShmOperation& first = *head;
    head = first.next;
    if (head == nullptr) tail = nullptr;
    return first;
  }
};

}  // namespace tessera::comm::shm
