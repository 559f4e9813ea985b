#include "tessera/comm/staging/ipc_state.h"

#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/kernels/device_reduce.h"
#include "tessera/comm/staging/pipeline.h"

namespace tessera::comm::staging {

IpcState::IpcState(StagingPipeline& engine, int ranks, std::shared_ptr<Logger> logger)
    : engine_(engine), windows_(*engine.windows()), ranks_(ranks), logger_(std::move(logger)) {
  read_.to_peer.resize(static_cast<std::size_t>(ranks));
  sent_.to_peer.resize(static_cast<std::size_t>(ranks));
}

bool IpcState::suits(const OpDesc& call) const {
  switch (call.kind) {
    case OpKind::send:
    case OpKind::recv:
    case OpKind::barrier:
      return false;
    case OpKind::all_reduce:
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::broadcast: {  // every rank knows the size of these
      const std::size_t bytes = call.kind == OpKind::reduce_scatter ? call.in.bytes() : call.out.bytes();
      const std::string_view algorithm = engine_.algorithms().choose(call.kind, bytes);
      if (!algorithm.empty() && algorithm != "direct") return false;
      break;
    }
    default:
      break;
  }
  return !reduces(call.kind) || ranks_ <= DeviceReduceKernels::kMaxSources;
}

std::optional<WindowLocation> IpcState::place_of(const void* data, std::size_t bytes) {
  try {
    return windows_.place_of(data, bytes);
  } catch (const Unsupported& error) {
    complain(error.what());
    return std::nullopt;
  }
}

void IpcState::correct(TrafficStats& snapshot) const {
  for (std::size_t i = 0; i < kOpKinds; ++i) snapshot.by_kind[i].bytes_sent += read_.by_kind[i] - sent_.by_kind[i];
  for (std::size_t r = 0; r < snapshot.bytes_to_peer.size(); ++r)
    snapshot.bytes_to_peer[r] += read_.to_peer[r] - sent_.to_peer[r];
}

void IpcState::complain(std::string_view why) {
  if (std::exchange(complained_, true) || logger_ == nullptr) return;
  logger_->write(LogLevel::warn, "memory of " + name_of(engine_.device().device()) +
                                     " moves through pinned host memory, not by IPC: " + std::string(why));
}

}  // namespace tessera::comm::staging
