// What the parts of one engine share: streams, buffer pools, communicators and collective plug-ins.
#pragma once

#include <memory>
#include <optional>

#include "tessera/base/trace.h"
#include "tessera/fsdp/copier.h"
#include "tessera/fsdp/engine/cpu_offload.h"
#include "tessera/fsdp/engine/engine_collectives.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/model.h"

namespace tessera::fsdp {

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
