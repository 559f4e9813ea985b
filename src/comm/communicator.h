// A group of ranks and the operations between them.
#pragma once

#include <array>
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

/// One operation as a backend receives it: checked, numbered, with its deadline fixed.
struct OpDesc {
  OpKind kind = OpKind::barrier;
  ConstView in = {};
  View out = {};
  ReduceOp op = {};  ///< avg's divisor is filled in
  int root = 0;      ///< of rooted collectives; the peer of send and recv
  /// The _v forms: elements per rank. `in_counts` say how `in` is cut, `out_counts` how `out` is; empty for equal
  /// parts. Valid during the call only.
  std::span<const std::size_t> in_counts = {};
  std::span<const std::size_t> out_counts = {};
  std::chrono::milliseconds timeout{};
  std::string_view label = {};
};

struct CommunicatorOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  std::shared_ptr<Logger> logger;                 ///< null: silence
  std::shared_ptr<MemoryTracker> memory_tracker;  ///< null: one of its own
};

/// Every rank of the group calls the same collectives in the same order with matching arguments; all calls return at
/// once with a Work, except split(). Memory that allocate() gave, also by another communicator split from the same root
/// and at any offset in it, is moved without staging; any other pointer works too. `out` may be `in` exactly where an
/// operation says so (in place); otherwise the two must not overlap. A count of 0 is allowed everywhere.
///
/// Errors. InvalidUsage and Unsupported are thrown by the call itself, before anything was sent: the communicator stays
/// usable. Mismatch, Timeout, PeerLost, Aborted, BackendError and SystemError come from waiting (or from the call that
/// hits an earlier one); they are fatal: every pending and later call fails with the first cause, on all ranks, and the
/// process lives.
///
/// Used by one thread at a time, abort() by any. Different communicators may be used by different threads. Works and
/// the communicators split from it are dropped before it; buffers may outlive it. The destructor waits for what is in
/// flight.
class TESSERA_API Communicator {
 public:
  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  std::string_view backend() const noexcept { return capabilities().backend; }
  virtual const Capabilities& capabilities() const noexcept = 0;

  /// out[i] = op over ranks of in[i]; in.count == out.count. In place: in == out.
  Work all_reduce(ConstView in, View out, ReduceOp op, OpOptions options = {});
  /// out = the inputs in rank order; out.count == in.count * size(). In place: in is rank()'s part of out.
  Work all_gather(ConstView in, View out, OpOptions options = {});
  /// out = part rank() of op over ranks of in; in.count == out.count * size(). In place: out is rank()'s part of in.
  Work reduce_scatter(ConstView in, View out, ReduceOp op, OpOptions options = {});
  /// out = root's in, on every rank; `in` is looked at on the root only. In place: in == out.
  Work broadcast(ConstView in, View out, int root, OpOptions options = {});
  /// As all_reduce, but only root's out is written; elsewhere `out` is not looked at. In place on the root: in == out.
  Work reduce(ConstView in, View out, ReduceOp op, int root, OpOptions options = {});
  /// As all_gather, but only root's out is written; elsewhere `out` is not looked at.
  Work gather(ConstView in, View out, int root, OpOptions options = {});
  /// out = part rank() of root's in; root's in.count == out.count * size(); elsewhere `in` is not looked at.
  Work scatter(ConstView in, View out, int root, OpOptions options = {});
  /// Part r of out = part rank() of rank r's in; counts are equal and multiples of size(). Not in place.
  Work all_to_all(ConstView in, View out, OpOptions options = {});

  /// The same with parts of different lengths, laid out one after the other in rank order. `counts` has size() entries:
  /// the elements of each rank's part; it is the same on every rank and is not looked at after the call returns.
  Work all_gather_v(ConstView in, View out, std::span<const std::size_t> counts, OpOptions options = {});
  Work reduce_scatter_v(ConstView in, View out, std::span<const std::size_t> counts, ReduceOp op,
                        OpOptions options = {});
  Work gather_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options = {});
  Work scatter_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options = {});
  /// `in_counts[r]` elements go to rank r, `out_counts[r]` come from it; rank a's in_counts[b] is rank b's
  /// out_counts[a].
  Work all_to_all_v(ConstView in, std::span<const std::size_t> in_counts, View out,
                    std::span<const std::size_t> out_counts, OpOptions options = {});

  /// To and from one peer, not this rank. Messages between two ranks arrive in the order they were sent; counts and
  /// dtypes of the two sides agree. Neither waits for collectives or other peers.
  Work send(ConstView data, int peer, OpOptions options = {});
  Work recv(View data, int peer, OpOptions options = {});
  /// Sends and receives that make progress together. Done when all are.
  Work batch(std::span<const P2POp> parts, OpOptions options = {});

  /// Done when every rank has called it.
  Work barrier(OpOptions options = {});

  /// Collective, and waits: ranks of equal color become a communicator of their own, ordered by key, then by rank. A
  /// negative color gets null. It has this one's settings, and a meter of its own.
  std::unique_ptr<Communicator> split(int color, int key);

  /// Uninitialised memory that this backend moves fastest, aligned to base::kAlignment, booked in the ledger under
  /// `use`, else by the caller. Local: nobody else takes part. May outlive the communicator. Zero bytes give a valid
  /// buffer. No stream may be at work on one that is given back: it is the next's. Throws SystemError, Unsupported.
  Buffer allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use);

  /// Every pending and later call fails with Aborted naming this rank and the reason, on all ranks (unless something
  /// else has failed before). Any thread.
  void abort(std::string reason) noexcept;

  /// Since the communicator was made.
  TrafficStats meter() const;

  /// The algorithm of the operation that was called last, in the spelling of TESSERA_ALGO: "direct". "" before the
  /// first call.
  std::string_view last_algorithm() const noexcept;

  const std::shared_ptr<Logger>& logger() const noexcept { return options_.logger; }
  const std::shared_ptr<MemoryTracker>& memory_tracker() const noexcept { return options_.memory_tracker; }
  std::chrono::milliseconds timeout() const noexcept { return options_.timeout; }

 protected:
  Communicator(int rank, int size, CommunicatorOptions options);
  const CommunicatorOptions& options() const noexcept { return options_; }

  /// For a communicator that stands before another one of the same ranks: calls that were checked go on to it.
  static Work forward_to(Communicator& inner, const OpDesc& call);
  static Work forward_to(Communicator& inner, std::span<const OpDesc> parts);

 private:
  virtual Work do_start(const OpDesc& call) = 0;
  virtual Work do_batch(std::span<const OpDesc> parts) = 0;
  virtual std::unique_ptr<Communicator> do_split(int color, int key) = 0;
  virtual Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) = 0;
  virtual void do_abort(std::string_view reason) noexcept = 0;
  /// The operation that is started next comes after what `stream` holds now. The default lets the host wait.
  virtual void do_after(Stream& stream);
  /// Adds bytes_sent by kind and by peer; calls are counted here.
  virtual void do_traffic(TrafficStats& snapshot) const = 0;
  /// What carried the last call. "": the only algorithm that the capabilities have for it.
  virtual std::string_view do_last_algorithm() const noexcept;

  Work start(OpDesc& call, const OpOptions& options);

  const int rank_;
  const int size_;
  const CommunicatorOptions options_;
  std::array<std::uint64_t, kOpKinds> calls_{};
  std::optional<OpKind> last_;
};

}  // namespace tessera::comm
