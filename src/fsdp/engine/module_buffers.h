// The buffers of a model, in one block of memory with the same layout on every rank, so that one broadcast transfers
// all of them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/fsdp/model.h"
#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

struct EngineResources;

/// The module buffers of one engine and rank; used by its thread. Only load() makes the host wait.
class TESSERA_API ModuleBuffers {
 public:
  /// Allocates their memory, tracked as `other`. Collective if there are any. `resources` outlives it.
  ModuleBuffers(const Module& model, EngineResources& resources);
  ~ModuleBuffers();

  const std::vector<std::shared_ptr<ModuleBuffer>>& all() const { return buffers_; }
  /// Appends initial values to the compute stream.
  void initialize(std::uint64_t seed);
  /// Broadcasts the buffers of rank `from`, in the order of the compute stream. Collective; no effect on one rank or
  /// without buffers.
  void broadcast(int from);
  /// As `sync` says; no effect for BufferSync::own. Like broadcast() otherwise.
  void synchronize(BufferSync sync);
  void load(const std::function<void(const ModuleBuffer&, void* out)>& fill,
            const std::function<bool(const ModuleBuffer&)>& wanted);
  void abort(const std::string& reason) noexcept {
    if (channel_ != nullptr) channel_->abort(reason);
  }
  /// Bytes that this rank sends in synchronize().
  std::uint64_t formula_bytes(BufferSync sync) const;
  comm::TrafficStats::TrafficCount traffic() const;

 private:
  comm::View view();
  void start(comm::Work work);

  EngineResources& resources_;
  const std::vector<std::shared_ptr<ModuleBuffer>> buffers_;
  Buffer memory_;
  std::unique_ptr<comm::Communicator> channel_;  // null if nothing is ever sent
  comm::Work last_;                              // broadcast or all_reduce
};

}  // namespace tessera::fsdp
