// The collective plug-ins of one engine, by which its units gather parameters and reduce gradients.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// Used by the engine's thread.
class EngineCollectives {
 public:
  /// Creates the plug-ins that `strategy` names. Former ones are destroyed with their state.
  void create(const CollectiveRegistry& registry, const Strategy& strategy);
  /// Prepares the plug-ins for the transfers of all units in each collective, which are the same in every step.
  void prepare(Runtime& runtime, LeasePool& buffers,
               const std::function<std::vector<TransferSpec>(comm::OpKind)>& transfers);

  CollectivePlugin& all_gather() { return *bindings_[0].plugin; }
  CollectivePlugin& reduce_scatter() { return *bindings_[1].plugin; }
  CollectivePlugin& all_reduce() { return *bindings_[2].plugin; }
  bool exact_gathers() const { return exact_gathers_; }  ///< gathered parameters are bitwise equal to those at rest
  /// The plug-in also gathers encodings; otherwise `plain` does.
  bool gathers_quantized() const { return gathers_quantized_; }
  /// Counts bytes of encodings that this rank sent by `plain`.
  void add_quantized_bytes(std::uint64_t bytes) { quantized_bytes_ += bytes; }

  /// The state of all plug-ins, named by collective and plug-in.
  std::vector<CollectivePlugin::State> state();
  void clear_state(Stream& stream);
  /// Throws InvalidUsage for an operation that is none of the three collectives.
  CollectiveStats stats(comm::OpKind collective) const;

 private:
  struct Binding {
    comm::OpKind collective;
    std::string Strategy::*name_in;
    std::string name;
    std::unique_ptr<CollectivePlugin> plugin;
  };
  std::array<Binding, 3> bindings_ = {{{comm::OpKind::all_gather, &Strategy::all_gather, {}, nullptr},
                                       {comm::OpKind::reduce_scatter, &Strategy::reduce_scatter, {}, nullptr},
                                       {comm::OpKind::all_reduce, &Strategy::all_reduce, {}, nullptr}}};
  bool exact_gathers_ = true, gathers_quantized_ = true;
  std::uint64_t quantized_bytes_ = 0;
};

}  // namespace tessera::fsdp
