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
#include "tessera/fsdp/copy.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// One flat parameter's part in a collective. In place as the communicator allows it.
struct Transfer {
  comm::ConstView in;
  comm::View out;
};

/// All flat parameters of a unit, in one call.
struct CollectiveCall {
  comm::Communicator& channel;
  std::span<const Transfer> transfers;  ///< valid during the call only; the memory stays valid until the works are done
  comm::ReduceOp op;                    ///< of reductions
  comm::OpOptions options;              ///< options.after holds what must come before
  Copier& copier;                       ///< the only way to copy between buffers: it counts
};

/// What was started; all of them done = the collective is done.
class TESSERA_API Works {
 public:
  Works() = default;
  void add(comm::Work work) { works_.push_back(std::move(work)); }
  /// `stream` continues after all of them. Errors are thrown where the stream waits.
  void wait_on(Stream& stream);
  bool empty() const { return works_.empty(); }

 private:
  std::vector<comm::Work> works_;
};

/// An instance belongs to one engine and one collective; used by the engine's thread.
class TESSERA_API CollectivePlugin {
 public:
  virtual ~CollectivePlugin();
  virtual Works run(const CollectiveCall& call) = 0;
};

/// What can be plugged in, by collective and name. A value: a program copies built_in() and adds its own.
class TESSERA_API CollectiveRegistry {
 public:
  using Make = std::function<std::unique_ptr<CollectivePlugin>()>;
  static CollectiveRegistry built_in();
  void add(comm::OpKind collective, std::string name, Make make);
  /// Throws InvalidUsage that lists the names known for this collective.
  std::unique_ptr<CollectivePlugin> make(comm::OpKind collective, std::string_view name) const;
  /// "all_gather:plain", ...
  std::vector<std::string> names() const;

 private:
  std::map<std::pair<comm::OpKind, std::string>, Make> makers_;
};

}  // namespace tessera::fsdp
