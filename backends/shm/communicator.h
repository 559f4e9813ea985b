// The Communicator of this backend: the public interface of a ShmGroup.
#pragma once

#include <memory>

#include "backends/shm/shm_group.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/split.h"

namespace tessera::comm::shm {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(std::shared_ptr<ShmGroup> group, CommunicatorOptions options, bool is_world);
  ~ShmCommunicator() override;
  const Capabilities& capabilities() const noexcept override { return group_->runtime().capabilities(); }

 private:
  Work do_start(const OpDesc& call) override { return group_->launch(group_->prepare(call, false)); }
  Work do_batch(std::span<const OpDesc> parts) override { return group_->start_batch(parts, false); }
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override;
  std::unique_ptr<Communicator> make_group(const GroupPlan& plan);
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  void do_abort(std::string_view reason) noexcept override { group_->abort(reason); }
  void do_traffic(TrafficStats& snapshot) const override { group_->read_traffic(snapshot); }
  std::string_view do_last_algorithm() const noexcept override { return group_->last_algorithm(); }

  const std::shared_ptr<ShmGroup> group_;
  const bool is_world_;
};

}  // namespace tessera::comm::shm
