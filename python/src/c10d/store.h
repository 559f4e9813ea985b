// PyTorch's store as the library's rendezvous uses it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/rendezvous_store.h"

namespace tessera::c10d_backend {

/// PyTorch gives each process group a prefix of its own in the store.
class TorchStore final : public comm::RendezvousStore {
 public:
  /// `prefix` of this store's keys.
  TorchStore(c10::intrusive_ptr<::c10d::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}
  void set(const std::string& key, std::string_view value) override;
  std::optional<std::string> get(const std::string& key, std::chrono::steady_clock::time_point until) override;

 private:
  const c10::intrusive_ptr<::c10d::Store> store_;
  const std::string prefix_;
};

}  // namespace tessera::c10d_backend
