// One operation in flight: a position in the order of the communicator's stream.
#pragma once

#include <string>
#include <vector>

#include "backends/nccl/cuda_objects.h"
#include "tessera/comm/core/operation.h"

namespace tessera::comm::nccl {

class StreamGroup;

class NcclOperation final : public Operation {
 public:
  NcclOperation(const NcclApi& api, StreamGroup& owner) : event(api), nccl_(owner) {}
  /// `title` names what is no operation of a caller, or a batch; a literal. `number`: 0 unless all members call it.
  /// `call` has copies of the counts of the _v forms, since NCCL may be called after the caller has given up.
  void reset(const OpDesc& what, std::uint64_t number, std::string_view title = {});

  /// Makes a device stream wait; the host only enqueues the wait.
  void wait_on(Stream& stream) override;
  std::string format() const override;

  CudaEvent event;
  bool recorded = false;  ///< the event was recorded for this operation; guarded by the group
  std::string signature;  ///< checked mode: what must be equal on all members

 private:
  StreamGroup& nccl_;
  std::string_view title_;
  std::vector<std::size_t> in_counts_;
  std::vector<std::size_t> out_counts_;
  std::string label_;  ///< the device may finish long after its caller has gone on
};

}  // namespace tessera::comm::nccl
