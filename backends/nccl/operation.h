// One operation in flight: a position in the order of the communicator's stream.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "backends/nccl/cuda_objects.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

class NcclGroup;

class NcclOperation final : public WorkState {
 public:
  static constexpr std::uint32_t kGood = 1;
  static constexpr std::uint32_t kFailed = 2;

  enum class OpClass : std::uint8_t {
    ordered,  ///< called by all members, and counted
    message,
    batch,  ///< of messages
  };
  /// Describes the call. `name` is a literal.
  struct OpInfo {
    std::string_view name;
    OpClass sort = OpClass::ordered;
    int peer = 0;                ///< of a message
    std::uint64_t sequence = 0;  ///< of an ordered one, from 1
    std::chrono::milliseconds timeout{};
    std::string label = {};
    std::string signature = {};  ///< checked mode: what must be equal on all members
  };

  explicit NcclOperation(const NcclApi& api) : event(api) {}
  void prepare(std::shared_ptr<NcclGroup> owner, OpInfo what);

  bool done() noexcept override;
  bool wait_until(Clock::time_point until) override;
  void wait() override;
  /// Makes a device stream wait; the host only enqueues the wait.
  void wait_on(Stream& stream) override;

  /// "all_reduce #12 (block.3)", "recv from rank 2".
  std::string describe() const;

  OpInfo what;
  std::shared_ptr<NcclGroup> group;  ///< while in use
  Clock::time_point deadline;
  CudaEvent event;
  bool recorded = false;  ///< the event was recorded for this operation; guarded by the group
  std::atomic<std::uint32_t> finished{0};

 protected:
  void recycle() noexcept override;
};

}  // namespace tessera::comm::nccl
