// Collective plug-ins: how the engine's three collectives are carried. `plain` calls the communicator; others may
// compress, lower one onto another, or measure.
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
#include "tessera/fsdp/types.h"
#include "tessera/nn/context.h"

namespace tessera::fsdp {

/// One flat parameter's part in a collective. In place as the communicator allows it.
struct FlatTransfer {
  comm::ConstView in;
  comm::View out;
  const FlatLayout* flat = nullptr;  ///< the flat parameter; the same in every step
};

/// All flat parameters of a unit, in one call.
struct CollectiveCall {
  comm::Communicator& channel;
  std::span<const FlatTransfer>
      transfers;            ///< valid during the call only; the memory stays valid until the works are done
  comm::ReduceOp op;        ///< of reductions: a sum, or one that is divided at its end
  comm::OpOptions options;  ///< options.after holds what must come before
  Copier& copier;           ///< the only way to copy between buffers: it counts
};

/// What was started. Some collectives have several rounds: when the operations of one are done, work on the stream that
/// waits for them makes the result, or what the next round sends.
class TESSERA_API WorkChain {
 public:
  /// Called once, when the works before it are waited for: appends to `stream`, and may start more.
  using Next = std::function<WorkChain(Stream& stream)>;
  WorkChain() = default;
  WorkChain(WorkChain&&) = default;
  WorkChain& operator=(WorkChain&&) = default;  // waits for the old works before it lets go of what `next` holds
  ~WorkChain() { works_.clear(); }

  void add(comm::Work work) { works_.push_back(std::move(work)); }
  void then(Next next) { next_ = std::move(next); }
  /// `stream` continues after this round, and with the next one where there is one. False: it was the last. Errors are
  /// thrown where the stream waits.
  bool advance(Stream& stream);
  /// `stream` continues after all rounds.
  void wait_on(Stream& stream);
  bool empty() const { return works_.empty() && !next_; }

 private:
  std::vector<comm::Work> works_;
  Next next_;
};

/// What a plug-in is like, for the engine that must know whether it fits, and for whoever chooses.
struct CollectiveCapabilities {
  bool exact = true;           ///< the values that come out are those that went in, or their sum
  bool linear = true;          ///< a sum over two axes, one after the other, is as good as one over both
  bool whole = false;          ///< needs whole flat parameters, not shards of them
  bool deterministic = true;   ///< the same input gives the same bits
  bool carries_state = false;  ///< from step to step; see state()
  std::vector<DType> dtypes;   ///< of the data; empty: any
  /// Encodings are bytes, each bit of which counts: where this is false they are gathered by `plain`.
  TESSERA_API bool carries_encodings() const;
};

/// A flat parameter that an instance will carry, in every step.
struct TransferSpec {
  std::string name;  ///< of the unit, and where it has several flat parameters which one
  const FlatLayout* flat = nullptr;
  DType dtype = DType::f32;
  std::int64_t elements = 0;  ///< of the larger side: a reduction's input, a gather's result
  int ranks = 1;              ///< of the channel
};

/// Where an instance works. All outlive it.
struct CollectiveSetup {
  comm::OpKind collective = comm::OpKind::all_gather;
  nn::Context& context;
  LeasePool& buffers;                       ///< memory that the backend moves fastest, booked as `communication`
  std::span<const TransferSpec> transfers;  ///< valid during the call
};

/// Bytes since the beginning: what `plain` would have sent from this rank, and what was sent.
struct CollectiveStats {
  std::uint64_t raw = 0;
  std::uint64_t sent = 0;
};

/// What `plain` starts, and what it sends from each rank for it.
TESSERA_API comm::Work start_plain(comm::OpKind collective, const CollectiveCall& call, const FlatTransfer& transfer);
TESSERA_API std::uint64_t plain_bytes(comm::OpKind collective, const FlatTransfer& transfer, int ranks);

/// An instance belongs to one engine and one collective; used by the engine's thread.
class TESSERA_API CollectivePlugin {
 public:
  virtual ~CollectivePlugin();
  virtual CollectiveCapabilities capabilities() const { return {}; }
  /// Once, before the first run(). Throws InvalidUsage or Unsupported, naming the plug-in, where it can't work so.
  virtual void prepare(const CollectiveSetup& /*setup*/) {}
  /// Appends to call.options.after, starts operations, and waits for nothing. An exception leaves the communicator as
  /// it was, or failed.
  virtual WorkChain run(const CollectiveCall& call) = 0;

  /// What it carries from step to step: f32, in the device's memory, saved and restored with the rank's checkpoint.
  /// Empty before prepare().
  struct State {
    std::string name;
    float* data = nullptr;
    std::size_t count = 0;
  };
  virtual std::vector<State> state() { return {}; }
  /// Appends: what it carries is as at the beginning.
  virtual void clear_state(Stream& /*stream*/) {}
  const CollectiveStats& stats() const { return stats_; }

 protected:
  CollectiveStats stats_;
};

/// What a collective moves of one flat parameter, by arithmetic alone.
struct CollectiveSize {
  std::uint64_t elements = 0;  ///< of the larger side
  DType dtype = DType::f32;
  int ranks = 1;
  std::span<const nn::Shape> shapes = {};  ///< of the flat parameter's parameters
};
struct CollectiveCost {
  std::uint64_t calls = 0;  ///< of the communicator
  std::uint64_t bytes = 0;  ///< sent by one rank
};

/// What can be plugged in, by collective and name. A value: a program copies built_in() and adds its own.
class TESSERA_API CollectiveRegistry {
 public:
  using Factory = std::function<std::unique_ptr<CollectivePlugin>()>;
  using Cost = std::function<CollectiveCost(const CollectiveSize&)>;
  /// `plain`, and those of plugins/collectives.
  static CollectiveRegistry built_in();
  /// `cost` empty: that of `plain`.
  void add(comm::OpKind collective, std::string name, Factory make, Cost cost = {});
  /// A name may also be FILE.so:NAME, of a shared object; see plugin.h. Throws InvalidUsage that lists the names known
  /// for this collective.
  std::unique_ptr<CollectivePlugin> make(comm::OpKind collective, std::string_view name) const;
  /// What its author says that it costs. Throws as make().
  CollectiveCost cost(comm::OpKind collective, std::string_view name, const CollectiveSize& size) const;
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

}  // namespace tessera::fsdp
