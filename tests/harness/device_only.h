// A communicator that accepts device memory only, as vendors' libraries do. It wraps one that accepts both kinds and
// supports the operations that the engine calls.
#pragma once

#include <memory>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tests/harness/symmetric_log.h"

namespace tessera::harness {

class DeviceOnly final : public comm::Communicator {
 public:
  /// `log`: of the rank; may be null.
  explicit DeviceOnly(std::unique_ptr<comm::Communicator> inner, std::shared_ptr<SymmetricLog> log = nullptr)
      : Communicator(inner->rank(), inner->size(), {inner->timeout(), inner->logger(), inner->memory_tracker()}),
        inner_(std::move(inner)),
        capabilities_(inner_->capabilities()),
        log_(std::move(log)),
        number_(log_ == nullptr ? 0 : log_->add_communicator()) {
    capabilities_.memory = {comm::MemoryKind::device};
  }
  const comm::Capabilities& capabilities() const noexcept override { return capabilities_; }

 private:
  comm::Work do_start(const comm::OpDesc& call) override {
    if (log_ != nullptr) log_->add_call(number_, call);
    const comm::OpOptions options{
        .after = std::exchange(after_, nullptr), .timeout = call.timeout, .label = call.label};
    switch (call.kind) {
      case comm::OpKind::all_gather:
        return inner_->all_gather(call.in, call.out, options);
      case comm::OpKind::reduce_scatter:
        return inner_->reduce_scatter(call.in, call.out, call.op, options);
      case comm::OpKind::all_reduce:
        return inner_->all_reduce(call.in, call.out, call.op, options);
      case comm::OpKind::broadcast:
        return inner_->broadcast(call.in, call.out, call.root, options);
      default:
        throw base::Unsupported(std::string(name_of(call.kind)) + ": not among what an engine calls");
    }
  }
  comm::Work do_batch(std::span<const comm::OpDesc>) override {
    throw base::Unsupported("batch: not among what an engine calls");
  }
  std::unique_ptr<comm::Communicator> do_create_group(std::span<const int> members,
                                                      const comm::OpOptions& options) override {
    return std::make_unique<DeviceOnly>(inner_->create_group(members, options), log_);
  }
  std::unique_ptr<comm::Communicator> do_split(int color, int key, const comm::SplitOptions& options) override {
    auto part = inner_->split(color, key, options);
    return part == nullptr ? nullptr : std::make_unique<DeviceOnly>(std::move(part), log_);
  }
  base::Buffer do_allocate(std::size_t bytes, comm::MemoryKind kind, std::optional<base::MemoryCategory> use) override {
    return inner_->allocate(bytes, kind, use);
  }
  base::Buffer do_allocate_symmetric(std::size_t bytes, comm::MemoryKind kind,
                                     std::optional<base::MemoryCategory> use) override {
    base::Buffer buffer = inner_->allocate_symmetric(bytes, kind, use);
    if (log_ != nullptr) log_->add_block(number_, buffer);
    return buffer;
  }
  void do_abort(std::string_view reason) noexcept override {
    try {
      inner_->abort(std::string(reason));
    } catch (const std::bad_alloc&) {
      inner_->abort({});
    }
  }
  void do_after(base::Stream& stream) override { after_ = &stream; }
  void do_traffic(comm::TrafficStats& snapshot) const override { snapshot = inner_->traffic(); }

  const std::unique_ptr<comm::Communicator> inner_;
  comm::Capabilities capabilities_;
  const std::shared_ptr<SymmetricLog> log_;
  const int number_;
  base::Stream* after_ = nullptr;
};

}  // namespace tessera::harness
