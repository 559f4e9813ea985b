#include "tessera/comm/core/composite.h"

namespace tessera::comm {
namespace {

class CompositeCommunicator final : public Communicator {
 public:
  CompositeCommunicator(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far)
      : Communicator(far->rank(), far->size(), {far->timeout(), far->logger(), far->memory_tracker()}),
        far_(std::move(far)),
        near_(std::move(near)),
        used_(near_->size() == far_->size() ? *near_ : *far_),
        capabilities_(used_.capabilities()) {
    capabilities_.splits_share_memory = near_->capabilities().splits_share_memory;
    capabilities_.memory = near_->capabilities().memory;
    capabilities_.deterministic = near_->capabilities().deterministic && far_->capabilities().deterministic;
    const std::int32_t own = rank();
    near_ranks_.resize(static_cast<std::size_t>(near_->size()));
    near_->all_gather(view_of(&own, 1), view_of(near_ranks_.data(), near_ranks_.size())).wait();
    before_ = used_.traffic();
  }

  const Capabilities& capabilities() const noexcept override { return capabilities_; }

 private:
  Work do_start(const OpDesc& call) override { return forward_to(used_, call); }
  Work do_batch(std::span<const OpDesc> parts) override { return forward_to(used_, parts); }
  /// All members of a child that share a host belong to the same near communicator, which is split in the same way.
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override {
    auto far = far_->split(color, key, options);
    auto near = near_->split(color, key, options);
    if (far == nullptr) return nullptr;
    return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
  }
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    std::vector<int> near_members;  // those on this host
    for (const int member : members)
      for (std::size_t k = 0; k < near_ranks_.size(); ++k)
        if (near_ranks_[k] == member) near_members.push_back(static_cast<int>(k));
    // First on the one that this communicator uses, which a failure is to end.
    std::unique_ptr<Communicator> far;
    if (&used_ == far_.get()) far = far_->create_group(members, options);
    auto near = near_->create_group(near_members, options);
    if (far == nullptr) far = far_->create_group(members, options);
    return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
  }
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return near_->allocate(bytes, kind, use);
  }
  void do_abort(std::string_view reason) noexcept override {
    far_->abort(std::string(reason));
    near_->abort(std::string(reason));
  }
  void do_traffic(TrafficStats& snapshot) const override {
    const TrafficStats inner = used_.traffic() - before_;
    for (std::size_t i = 0; i < kOpKinds; ++i) snapshot.by_kind[i].bytes_sent = inner.by_kind[i].bytes_sent;
    snapshot.bytes_to_peer = inner.bytes_to_peer;
  }

  const std::unique_ptr<Communicator> far_;
  const std::unique_ptr<Communicator> near_;
  Communicator& used_;
  Capabilities capabilities_;
  std::vector<std::int32_t> near_ranks_;  ///< rank in `far_` of each member of `near_`
  TrafficStats before_;                   ///< of the constructor
};

}  // namespace

std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far) {
  return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
}

}  // namespace tessera::comm
