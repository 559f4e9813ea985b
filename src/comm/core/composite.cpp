#include "tessera/comm/core/composite.h"

#include <utility>

#include "tessera/comm/core/decorator.h"

namespace tessera::comm {
namespace {

/// Around the communicator that it uses.
class CompositeCommunicator final : public Decorator {
 public:
  CompositeCommunicator(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far)
      : Decorator(std::move(near->size() == far->size() ? near : far)),
        uses_near_(near == nullptr),
        other_(std::move(uses_near_ ? far : near)) {
    own_capabilities().splits_share_memory = near_.capabilities().splits_share_memory;
    own_capabilities().memory = near_.capabilities().memory;
    own_capabilities().deterministic = near_.capabilities().deterministic && far_.capabilities().deterministic;
    const std::int32_t own = rank();
    near_ranks_.resize(static_cast<std::size_t>(near_.size()));
    near_.all_gather(view_of(&own, 1), view_of(near_ranks_.data(), near_ranks_.size())).wait();
    forget_traffic();
  }
  ~CompositeCommunicator() override {
    if (uses_near_) close_inner();  // near_ closes first
  }

 private:
  /// All members of a child that share a host belong to the same near communicator, which is split in the same way.
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override {
    auto far = far_.split(color, key, options);
    auto near = near_.split(color, key, options);
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
    if (!uses_near_) far = far_.create_group(members, options);
    auto near = near_.create_group(near_members, options);
    if (far == nullptr) far = far_.create_group(members, options);
    return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
  }
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return near_.allocate(bytes, kind, use);
  }
  /// Of no use to far_, whose ranks do not all share near_.
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return uses_near_ ? Decorator::do_allocate_symmetric(bytes, kind, use) : do_allocate(bytes, kind, use);
  }
  void do_abort(std::string_view reason) noexcept override {
    far_.abort(std::string(reason));
    near_.abort(std::string(reason));
  }

  const bool uses_near_;
  const std::unique_ptr<Communicator> other_;
  Communicator& near_ = uses_near_ ? inner() : *other_;
  Communicator& far_ = uses_near_ ? *other_ : inner();
  std::vector<std::int32_t> near_ranks_;  ///< rank in `far_` of each member of `near_`
};

}  // namespace

std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far) {
  return std::make_unique<CompositeCommunicator>(std::move(near), std::move(far));
}

}  // namespace tessera::comm
