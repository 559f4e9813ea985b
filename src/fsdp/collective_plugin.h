// Collective plug-ins: implementations of the engine's three collectives. `plain` calls the communicator; others may
// compress, implement one collective by another, or measure.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/fsdp/copier.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/model.h"

namespace tessera::fsdp {

/// One flat parameter's buffers in a collective. In place where the communicator allows it.
struct FlatTransfer {
  comm::ConstView in;                ///< what this rank contributes
  comm::View out;                    ///< destination of this rank's result
  const FlatLayout* flat = nullptr;  ///< the flat parameter; the same in every step
};

/// All flat parameters of a unit, in one call.
struct CollectiveCall {
  comm::Communicator& channel;  ///< the communicator of the axis over which the engine gathers or reduces
  std::span<const FlatTransfer>
      transfers;            ///< valid during the call only; the memory stays valid until the works are done
  comm::ReduceOp op;        ///< operation of reductions: a sum, or one whose result is divided
  comm::OpOptions options;  ///< options.after: the stream whose work must come before
  Copier& copier;           ///< the only way to copy between buffers: it counts bytes
};

/// The operations that a plug-in has submitted. Some collectives have several rounds: once the operations of a round
/// are done, work on the waiting stream computes the result, or the data that the next round sends.
class TESSERA_API WorkChain {
 public:
  /// Called once, when the stream waits for the works before it: appends to `stream`, and may submit more operations.
  using Next = std::function<WorkChain(Stream& stream)>;
  WorkChain() = default;
  WorkChain(WorkChain&&) = default;  ///< the source is then only fit for assignment and destruction
  /// Waits for the current operations before it releases what the next round holds.
  WorkChain& operator=(WorkChain&&) = default;  // waits for the old works before it releases what `next` holds
  ~WorkChain() { works_.clear(); }

  void add(comm::Work work) { works_.push_back(std::move(work)); }  ///< adds an operation to this round
  void then(Next next) { next_ = std::move(next); }  ///< sets the next round; at most one, which may set another
  /// Makes `stream` wait for this round and submits the next one, if any. Returns false if it was the last round.
  /// Errors are thrown where the stream waits.
  bool advance(Stream& stream);
  /// Makes `stream` wait for all rounds.
  void wait_on(Stream& stream);
  bool empty() const { return works_.empty() && !next_; }  ///< true if there is nothing to wait for

 private:
  std::vector<comm::Work> works_;
  Next next_;
};

/// Properties of a plug-in, by which the engine checks that it fits and a user chooses.
struct CollectiveCapabilities {
  bool exact = true;          ///< outputs are exactly the inputs, or their sum
  bool linear = true;         ///< summing over two axes one after the other is as good as one sum over both
  bool whole = false;         ///< needs whole flat parameters, not shards
  bool deterministic = true;  ///< the same input gives the same bits
  bool has_state = false;     ///< keeps state between steps; see state()
  std::vector<DType> dtypes;  ///< supported dtypes of the data; empty: any
  /// Whether the plug-in can gather encodings, of which each bit counts. Where false, `plain` gathers them.
  TESSERA_API bool gathers_quantized() const;
};

/// A flat parameter that an instance transfers in every step.
struct TransferSpec {
  std::string name;                  ///< name of the unit, and of the flat parameter where it has several
  const FlatLayout* flat = nullptr;  ///< outlives the instance
  DType dtype = DType::f32;          ///< dtype of the data
  std::int64_t elements = 0;         ///< elements of the larger side: a reduction's input, an all-gather's output
  int ranks = 1;                     ///< ranks of the communicator
};

/// Environment of an instance. All references outlive it.
struct CollectiveSetup {
  comm::OpKind collective = comm::OpKind::all_gather;  ///< all_gather, reduce_scatter or all_reduce
  Runtime& runtime;                                    ///< memory and arithmetic
  LeasePool& buffers;                       ///< memory that the backend transfers fastest, tracked as `communication`
  std::span<const TransferSpec> transfers;  ///< valid during the call
};

/// Cumulative bytes: what `plain` would have sent from this rank, and what was sent.
struct CollectiveStats {
  std::uint64_t raw = 0;   ///< bytes that `plain` would have sent
  std::uint64_t sent = 0;  ///< bytes that the plug-in sent
};

/// The operation that `plain` submits.
TESSERA_API comm::Work start_plain(comm::OpKind collective, const CollectiveCall& call, const FlatTransfer& transfer);
/// The bytes that each of `ranks` ranks sends for the operation of start_plain().
TESSERA_API std::uint64_t plain_bytes(comm::OpKind collective, const FlatTransfer& transfer, int ranks);

/// An instance belongs to one engine and one collective. Used by the engine's thread.
class TESSERA_API CollectivePlugin {
 public:
  virtual ~CollectivePlugin();
  /// Default: an exact plug-in for any dtype.
  virtual CollectiveCapabilities capabilities() const { return {}; }
  /// Called once, before the first run(). Throws InvalidUsage or Unsupported, naming the plug-in, where it does not
  /// support the setup.
  virtual void prepare(const CollectiveSetup& /*setup*/) {}
  /// Appends to call.options.after, submits operations, and does not wait. After an exception the communicator is
  /// unchanged, or failed.
  virtual WorkChain run(const CollectiveCall& call) = 0;

  /// Plug-in state kept between steps: f32, in device memory, saved and restored with the rank's checkpoint. Empty
  /// before prepare().
  struct State {
    std::string name;       ///< unique among the states of this plug-in
    float* data = nullptr;  ///< owned by the plug-in
    std::size_t count = 0;  ///< values
  };
  virtual std::vector<State> state() { return {}; }  ///< default: a plug-in without state
  /// Appends work to `stream` that resets the state to its initial value.
  virtual void clear_state(Stream& /*stream*/) {}
  const CollectiveStats& stats() const { return stats_; }  ///< since the instance was created

 protected:
  CollectiveStats stats_;  ///< run() adds to both
};

/// Size of one flat parameter's transfer, for cost formulas.
struct CollectiveSize {
  std::uint64_t elements = 0;          ///< elements of the larger side
  DType dtype = DType::f32;            ///< dtype of the data
  int ranks = 1;                       ///< ranks of the communicator
  std::span<const Shape> shapes = {};  ///< shapes of the parameters in the flat parameter
};
/// What a collective of one flat parameter costs.
struct CollectiveCost {
  std::uint64_t calls = 0;  ///< calls of the communicator
  std::uint64_t bytes = 0;  ///< sent by one rank
};

/// The available collective plug-ins, by collective and name. A value type: a program copies built_in() and adds its
/// own.
class TESSERA_API CollectiveRegistry {
 public:
  /// Creates an instance for one engine.
  using Factory = std::function<std::unique_ptr<CollectivePlugin>()>;
  using Cost = std::function<CollectiveCost(const CollectiveSize&)>;  ///< the cost formula of a plug-in
  /// `plain`, and the plug-ins of plugins/collectives.
  static CollectiveRegistry built_in();
  /// `cost` empty: the cost of `plain`.
  void add(comm::OpKind collective, std::string name, Factory make, Cost cost = {});
  /// A name may also be FILE.so:NAME, of a plug-in file; see plugin.h. Throws InvalidUsage that lists the names known
  /// for this collective.
  std::unique_ptr<CollectivePlugin> make(comm::OpKind collective, std::string_view name) const;
  /// The plug-in's cost formula. Throws as make() does.
  CollectiveCost cost(comm::OpKind collective, std::string_view name, const CollectiveSize& size) const;
  /// Whether make() knows the name. Throws if `name` refers to a plug-in file that cannot be loaded.
  bool has(comm::OpKind collective, std::string_view name) const;
  /// "all_gather:plain", ...
  std::vector<std::string> names() const;

 private:
  struct Entry {
    Factory make;
    Cost cost;
  };
  static Entry entry_of(comm::OpKind collective, Factory make, Cost cost);
  Entry find(comm::OpKind collective, std::string_view name) const;
  std::map<std::pair<comm::OpKind, std::string>, Entry> entries_;
};

/// Adds the plug-ins of plugins/collectives, which are part of the library; CollectiveRegistry::built_in() calls it.
void add_built_in_collectives(CollectiveRegistry& registry);

}  // namespace tessera::fsdp
