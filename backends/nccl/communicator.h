// The Communicator of this backend: a Group with the public interface.
#pragma once

#include <memory>

#include "backends/nccl/nccl_group.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::nccl {

/// Creates the communicator of all ranks of `bootstrap` over the functions in `api`, which must outlive everything.
/// Collective.
std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options,
                                         const NcclApi& api);

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, CommunicatorOptions options);
  ~NcclCommunicator() override;
  const Capabilities& capabilities() const noexcept override { return group_->capabilities(); }

 private:
  Work do_start(const OpDesc& call) override { return group_->start(call); }
  Work do_batch(std::span<const OpDesc> parts) override { return group_->start_batch(parts); }
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override;
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  void do_abort(std::string_view reason) noexcept override { group_->abort(reason); }
  void do_after(Stream& stream) override;
  void do_traffic(TrafficStats& snapshot) const override { group_->read_traffic(snapshot); }

  const std::shared_ptr<NcclGroup> group_;
};

}  // namespace tessera::comm::nccl
