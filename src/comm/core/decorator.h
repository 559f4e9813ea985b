// The common base of communicators around another one.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// Around a communicator of the same ranks, which it owns. Passes everything on; a derived class overrides what
/// differs, so that nothing is forgotten.
class TESSERA_API Decorator : public Communicator {
 public:
  const Capabilities& capabilities() const noexcept final { return capabilities_; }

 protected:
  explicit Decorator(std::unique_ptr<Communicator> inner);
  Communicator& inner() const noexcept { return *inner_; }
  /// The inner one's, for a constructor to change.
  Capabilities& own_capabilities() noexcept { return capabilities_; }
  /// What a constructor moved is not among this one's traffic.
  void forget_traffic() { before_ = inner_->traffic(); }
  /// For a destructor: the inner one otherwise closes after all members of the derived class.
  void close_inner() noexcept { inner_.reset(); }

  Work do_start(const OpDesc& call) override { return forward_to(*inner_, call); }
  Work do_batch(std::span<const OpDesc> parts) override { return forward_to(*inner_, parts); }
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override;
  std::unique_ptr<Communicator> do_create_group(std::span<const int> members, const OpOptions& options) override {
    return decorate(inner_->create_group(members, options));
  }
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return inner_->allocate(bytes, kind, use);
  }
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override {
    return inner_->allocate_symmetric(bytes, kind, use);
  }
  void do_abort(std::string_view reason) noexcept override;
  void do_after(Stream& stream) override { forward_after(*inner_, stream); }
  void do_traffic(TrafficStats& snapshot) const override;

 private:
  /// Wraps what was split from the inner one, or made of some of its ranks. By default it stays as it is.
  virtual std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) { return child; }

  std::unique_ptr<Communicator> inner_;
  Capabilities capabilities_;
  TrafficStats before_;
};

}  // namespace tessera::comm
