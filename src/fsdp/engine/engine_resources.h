// What the parts of one engine share: streams, buffer pools, communicators and collective plug-ins.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/copier.h"
#include "tessera/fsdp/engine/cpu_offload.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/model.h"
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

/// One per engine; used by its thread. The plug-ins of `collectives` do not exist yet.
struct EngineResources {
  /// Collective. `runtime` and `world` outlive it; options.mesh is set.
  EngineResources(Runtime& runtime, comm::Communicator& world, const EngineOptions& options);

  Runtime& runtime;
  Mesh mesh;
  const std::unique_ptr<Stream> gather_stream;  ///< gathers start in its order
  const std::unique_ptr<Stream> reduce_stream;  ///< likewise reductions
  const std::unique_ptr<Stream> poison_stream;  ///< null: released buffers are not poisoned
  LeasePool parameters;                         ///< unsharded
  LeasePool gradients;                          ///< unsharded
  LeasePool buffers;                            ///< of collective plug-ins
  EngineCollectives collectives;                ///< destroyed before their buffers
  TraceRecorder trace;
  Copier copier;
  const std::unique_ptr<CpuOffload> offload;  ///< null: everything is on the device
  const std::int64_t offload_chunk_elements;  ///< elements that the optimizer updates at a time with CPU offload
  const std::optional<DType> reduce_dtype;    ///< empty: gradients are reduced in their own dtype

  Stream& compute() { return runtime.stream(); }
  Device device() const { return runtime.device(); }
  /// What the engine's collectives do with memory.
  enum class Transfer { none, gathered, reduced };
  /// Allocates device memory, from the backend if it provides some, since it transfers its own memory fastest. `use`
  /// empty: not tracked. Memory that is gathered or reduced is symmetric on the communicator of the innermost axis that
  /// does so; then the call is collective over that axis. All ranks choose memory in the order of their calls, which is
  /// the same on all, so collectives get the same buffers everywhere.
  Buffer allocate(std::size_t bytes, std::optional<MemoryCategory> use, Transfer transfer = Transfer::none);
  /// Makes the compute stream wait for all copies to and from offloaded shards.
  void join_offload();
  /// Waits until no work of the engine uses its memory.
  void wait_for_device();
  void zero(Stream& stream, void* data, std::size_t bytes) { runtime.device_runtime().fill(stream, data, 0, bytes); }

 private:
  LeasePool make_pool(MemoryCategory use, Transfer transfer = Transfer::none);
  Buffer allocate_on_device(std::size_t bytes, std::optional<MemoryCategory> use, Transfer transfer);
};

}  // namespace tessera::fsdp
