// A group of ranks and the operations between them.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/export.h"
#include "tessera/base/log.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/traffic.h"
#include "tessera/comm/types.h"
#include "tessera/comm/work.h"

namespace tessera::comm {

/// One operation as a backend receives it: validated, numbered, with a fixed deadline.
struct OpDesc {
  OpKind kind = OpKind::barrier;  ///< the operation; a _v form has the kind of the form without
  ConstView in = {};              ///< what this rank contributes; empty where it contributes nothing
  View out = {};                  ///< destination of this rank's result; empty if it gets none
  ReduceOp op = {};               ///< avg's divisor is filled in
  int root = 0;                   ///< root of rooted collectives; the peer of send and recv
  /// Elements per rank, of the _v forms. `in_counts` describes the parts of `in`, `out_counts` those of `out`; empty
  /// for equal parts. Valid only during the call.
  std::span<const std::size_t> in_counts = {};
  std::span<const std::size_t> out_counts = {};  ///< see in_counts
  std::chrono::milliseconds timeout{};           ///< time from issue to completion
  std::string_view label = {};                   ///< OpOptions::label
  int tag = 0;                                   ///< OpOptions::tag
  int* source = nullptr;                         ///< OpOptions::source
};

/// Settings that a communicator passes on to those split from it.
struct CommunicatorOptions {
  /// Default of OpOptions::timeout; each operation must complete within it.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::shared_ptr<Logger> logger;                 ///< null: no logging
  std::shared_ptr<MemoryTracker> memory_tracker;  ///< null: creates one
};

/// What a communicator that split() makes is for.
struct SplitOptions {
  /// It will mostly gather memory of allocate_symmetric() beside computations; a backend may then choose how its
  /// gathers use the device. Any operation works all the same. Equal on all ranks.
  bool for_gathers = false;
};

/// An ordered group of ranks and its operations. Every rank calls the same collectives in the same order with matching
/// arguments. All calls but split() return a Work at once. Memory from allocate(), also of another communicator split
/// from the same root and at any offset, moves without staging; any other pointer works too. `out` may equal `in` only
/// where an operation documents it (in place); otherwise the two must not overlap. A count of 0 is always allowed.
///
/// Errors: the call itself throws InvalidUsage and Unsupported before it sends anything; the communicator stays usable.
/// Mismatch, Timeout, PeerLost, Aborted, BackendError and SystemError are thrown by waiting, or by a call after an
/// earlier failure. They are fatal: every pending and later call fails with the first cause, on all ranks, and the
/// process continues. A split with all ranks in their order may share resources with its original (nccl): then both
/// fail together. Other communicators stay usable.
///
/// In a process that a rank forks, the communicator's calls throw InvalidUsage, and neither they nor its destructor,
/// also at exit(), do anything to the rank or its peers.
///
/// One thread at a time issues calls; another one may wait for their Works meanwhile, and any may call abort().
/// Different threads may use different communicators. Works and communicators split from it must be destroyed before
/// it; buffers may outlive it. The destructor waits for operations in flight.
class TESSERA_API Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }  ///< rank of this process or thread in this communicator, from 0
  int size() const noexcept { return size_; }  ///< number of ranks
  /// Name of the backend: "tcp"; valid while the communicator lives.
  std::string_view backend() const noexcept { return capabilities().backend; }
  /// The same on every rank; valid while the communicator lives.
  virtual const Capabilities& capabilities() const noexcept = 0;

  /// out[i] = op over ranks of in[i]; in.count == out.count. In place: in == out.
  Work all_reduce(ConstView in, View out, ReduceOp op, OpOptions options = {});
  /// out = the inputs in rank order; out.count == in.count * size(). In place: in is rank()'s part of out.
  Work all_gather(ConstView in, View out, OpOptions options = {});
  /// out = part rank() of op over ranks of in; in.count == out.count * size(). In place: out is rank()'s part of in.
  Work reduce_scatter(ConstView in, View out, ReduceOp op, OpOptions options = {});
  /// out = root's in, on every rank; `in` is ignored on the others. In place: in == out.
  Work broadcast(ConstView in, View out, int root, OpOptions options = {});
  /// The same as all_reduce, but only root's out is written; elsewhere `out` is ignored. In place on root: in == out.
  Work reduce(ConstView in, View out, ReduceOp op, int root, OpOptions options = {});
  /// The same as all_gather, but only root's out is written; elsewhere `out` is ignored.
  Work gather(ConstView in, View out, int root, OpOptions options = {});
  /// out = part rank() of root's in; root's in.count == out.count * size(); elsewhere `in` is ignored.
  Work scatter(ConstView in, View out, int root, OpOptions options = {});
  /// Part r of out = part rank() of rank r's in; counts are equal and multiples of size(). Not in place.
  Work all_to_all(ConstView in, View out, OpOptions options = {});

  /// The same with parts of different lengths, concatenated in rank order. `counts` has size() entries, the elements of
  /// each rank's part. It is the same on every rank and is not read after the call returns.
  Work all_gather_v(ConstView in, View out, std::span<const std::size_t> counts, OpOptions options = {});
  /// The same as reduce_scatter(), with parts of `counts` elements.
  Work reduce_scatter_v(ConstView in, View out, std::span<const std::size_t> counts, ReduceOp op,
                        OpOptions options = {});
  /// The same as gather(), with parts of `counts` elements.
  Work gather_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options = {});
  /// The same as scatter(), with parts of `counts` elements.
  Work scatter_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options = {});
  /// Sends `in_counts[r]` elements to rank r and receives `out_counts[r]` from it; rank a's in_counts[b] is rank b's
  /// out_counts[a].
  Work all_to_all_v(ConstView in, std::span<const std::size_t> in_counts, View out,
                    std::span<const std::size_t> out_counts, OpOptions options = {});

  /// Sends to, or receives from, one peer other than this rank. Messages of one tag between two ranks arrive in the
  /// order they were sent; counts and dtypes of the two sides must agree. Neither waits for collectives or other peers.
  /// A receive from kAnyRank takes a message that no receive from its sender awaits.
  Work send(ConstView data, int peer, OpOptions options = {});
  Work recv(View data, int peer, OpOptions options = {});  ///< the counterpart of send(); `data` is written
  /// Sends and receives that progress together. Done when all are done.
  Work batch(std::span<const P2POp> parts, OpOptions options = {});

  /// Done when every rank has called it.
  Work barrier(OpOptions options = {});

  /// Collective and blocking. Ranks of equal color form a communicator, ordered by key, then by rank; a negative color
  /// returns null. The result has this one's settings and its own traffic counters.
  std::unique_ptr<Communicator> split(int color, int key, SplitOptions options = {});

  /// Makes a communicator of some of this one's ranks, in this order, without the help of the others. Collective over
  /// `members` and blocking: they all pass the same list, which this rank is on. Unlike other calls, threads may make
  /// groups at the same time, also while another thread issues calls; `options.tag` (0 to kMaxTag) then tells those
  /// groups apart that have members in common. `options.timeout` is that of each of its exchanges; `label` appears in
  /// its errors, which are fatal for this communicator, too. The result has this one's settings and its own traffic
  /// counters. Throws InvalidUsage, Unsupported and what waiting throws.
  std::unique_ptr<Communicator> create_group(std::span<const int> members, OpOptions options = {});

  /// Allocates uninitialized memory that this backend moves fastest, aligned to base::kAlignment. The tracker counts it
  /// under `use`; without `use` the caller counts it. Local: no other rank takes part. The buffer may outlive the
  /// communicator. Zero bytes return a valid buffer. No stream may still use a buffer when it is released, since the
  /// next request may reuse it. Throws SystemError, Unsupported.
  Buffer allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use);

  /// The same as allocate(), but collective and blocking: all ranks call it in the same order with equal `bytes` and
  /// `kind`, also relative to this communicator's operations, of which some may be in flight. This communicator may be
  /// faster with such buffers; in exchange, all ranks pass its collectives the buffers of the same calls at the same
  /// offsets (in place, the rank's own slice), or results may be wrong; checked mode throws Mismatch where all_gather,
  /// reduce_scatter or all_reduce get others. Other communicators use them as other memory. Releasing a buffer is
  /// local, but at each call all ranks have released the same buffers of earlier calls of this communicator, or it
  /// throws Mismatch. A backend to which it makes no difference allocates locally. It is not an operation: it is in no
  /// traffic(). Also throws Mismatch, Timeout, PeerLost, Aborted and BackendError, which are fatal.
  Buffer allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use);

  /// Makes every pending and later call fail on all ranks with Aborted, naming this rank and the reason (unless the
  /// communicator has already failed). Any thread, but never a signal handler: it locks and allocates, and the thread
  /// that the signal interrupted may hold the lock. To abort on a signal, block it in all threads and take it with
  /// sigwait() in one that then calls abort(), or let the handler set a flag.
  void abort(std::string reason) noexcept;

  /// The traffic since the communicator was created.
  TrafficStats traffic() const;

  /// The algorithm of the last operation called, in the spelling of TESSERA_ALGO: "direct". "" before the first call.
  std::string_view last_algorithm() const noexcept;

  const std::shared_ptr<Logger>& logger() const noexcept { return options_.logger; }  ///< null: no logging
  /// Counts the memory of allocate().
  const std::shared_ptr<MemoryTracker>& memory_tracker() const noexcept { return options_.memory_tracker; }
  /// The default timeout of operations.
  std::chrono::milliseconds timeout() const noexcept { return options_.timeout; }

 protected:
  /// Called by a backend. `rank` and `size` never change.
  Communicator(int rank, int size, CommunicatorOptions options);
  const CommunicatorOptions& options() const noexcept { return options_; }  ///< options given to the constructor

  /// Passes on a call that was already validated, from a decorator around a communicator of the same ranks. `inner`
  /// must live as long as this one, which then reports its last_algorithm().
  Work forward_to(Communicator& inner, const OpDesc& call);
  /// The same for the parts of a batch.
  Work forward_to(Communicator& inner, std::span<const OpDesc> parts);
  /// Likewise: the next operation of `inner` starts after the work that `stream` holds now.
  static void forward_after(Communicator& inner, Stream& stream) { inner.do_after(stream); }

  /// Whether this process is a fork of the rank's: its threads don't exist here, and its connections and shared memory
  /// are the rank's. The destructor must then leave everything as it is.
  bool is_parents() const noexcept { return made_in_ != base::forks_so_far(); }

 private:
  virtual Work do_start(const OpDesc& call) = 0;
  virtual Work do_batch(std::span<const OpDesc> parts) = 0;
  virtual std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) = 0;
  /// `members` and `options` are valid, and the timeout is set; any thread. By default throws Unsupported.
  virtual std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options);
  virtual Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) = 0;
  /// The default is do_allocate().
  virtual Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use);
  virtual void do_abort(std::string_view reason) noexcept = 0;
  /// The next operation starts after the work that `stream` holds now. By default the host waits.
  virtual void do_after(Stream& stream);
  /// Adds bytes_sent by kind and by peer; the base class counts the calls.
  virtual void do_traffic(TrafficStats& snapshot) const = 0;
  /// The algorithm of the last call. "" means that of the communicator to which it was forwarded, or the only one that
  /// the capabilities list for it.
  virtual std::string_view do_last_algorithm() const noexcept;

  /// Throws InvalidUsage in a fork.
  void require_own_process(std::string_view call) const;
  /// Validates a call and completes its description. `by_counts`: it is a _v form.
  void prepare(OpDesc& call, const OpOptions& options, bool by_counts) const;
  Work start(OpDesc call, const OpOptions& options, bool by_counts = false);

  const int rank_;
  const int size_;
  const CommunicatorOptions options_;
  const std::uint32_t made_in_ = base::count_forks();
  std::atomic<const Communicator*> forwarded_to_{nullptr};  ///< null: no call yet
  std::array<std::uint64_t, kOpKinds> calls_{};
  std::optional<OpKind> last_;
};

}  // namespace tessera::comm
