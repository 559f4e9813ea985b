// A communicator that accepts device memory only, as vendors' libraries do. It wraps one that accepts both kinds and
// supports the operations that the engine calls.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/core/decorator.h"
#include "tests/harness/symmetric_log.h"

namespace tessera::harness {

class DeviceOnly final : public comm::Decorator {
 public:
  /// `log`: of the rank; may be null.
  explicit DeviceOnly(std::unique_ptr<comm::Communicator> inner, std::shared_ptr<SymmetricLog> log = nullptr)
      : Decorator(std::move(inner)), log_(std::move(log)), number_(log_ == nullptr ? 0 : log_->add_communicator()) {
    own_capabilities().memory = {comm::MemoryKind::device};
  }

 private:
  comm::Work do_start(const comm::OpDesc& call) override {
    using comm::OpKind;
    constexpr std::array kCalled = {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce, OpKind::broadcast};
    if (log_ != nullptr) log_->add_call(number_, call);
    if (std::find(kCalled.begin(), kCalled.end(), call.kind) == kCalled.end())
      throw base::Unsupported(std::string(name_of(call.kind)) + ": not among what an engine calls");
    return Decorator::do_start(call);
  }
  comm::Work do_batch(std::span<const comm::OpDesc>) override {
    throw base::Unsupported("batch: not among what an engine calls");
  }
  std::unique_ptr<comm::Communicator> decorate(std::unique_ptr<comm::Communicator> child) override {
    return std::make_unique<DeviceOnly>(std::move(child), log_);
  }
  base::Buffer do_allocate_symmetric(std::size_t bytes, comm::MemoryKind kind,
                                     std::optional<base::MemoryCategory> use) override {
    base::Buffer buffer = Decorator::do_allocate_symmetric(bytes, kind, use);
    if (log_ != nullptr) log_->add_block(number_, buffer);
    return buffer;
  }

  const std::shared_ptr<SymmetricLog> log_;
  const int number_;
};

}  // namespace tessera::harness
