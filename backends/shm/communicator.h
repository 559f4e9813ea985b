// The Communicator of this backend: a Group with the public interface.
#pragma once

#include <memory>

#include "backends/shm/shm_group.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::shm {

class ShmCommunicator final : public Communicator {
 public:
  ShmCommunicator(std::shared_ptr<ShmGroup> group, CommunicatorOptions options, bool is_world);
  ~ShmCommunicator() override;
  const Capabilities& capabilities() const noexcept override;

 private:
  Work do_start(const OpDesc& call) override;
  Work do_batch(std::span<const OpDesc> parts) override;
  std::unique_ptr<Communicator> do_split(int color, int key) override;
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  void do_abort(std::string_view reason) noexcept override;
  void do_traffic(TrafficStats& snapshot) const override;
  std::string_view do_last_algorithm() const noexcept override { return group_->last_algorithm(); }
  /// Gathers one value of every member, without metering. `mine` has the same length on every rank.
  template <class T>
  std::vector<T> collect(const T& mine);

  const std::shared_ptr<ShmGroup> group_;
  const bool is_world_;
};

}  // namespace tessera::comm::shm
