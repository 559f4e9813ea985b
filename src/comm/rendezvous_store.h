// How the ranks of a program that has a key-value store of its own find each other.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// A store that all ranks of a world share and others can't read, such as PyTorch's or etcd's. Rank 0 publishes under
/// one key where it listens, and a random secret; the others look them up. So no port must be free in advance. Each
/// world needs a store, or keys, of its own. Functions may throw: init() then throws the same. Used by one thread.
class TESSERA_API RendezvousStore {
 public:
  virtual ~RendezvousStore();
  /// Makes `value` (at most some KiB of text) visible to all ranks.
  virtual void set(const std::string& key, std::string_view value) = 0;
  /// The value of a key, for which it waits until this point in time. Empty: it had not been set by then.
  virtual std::optional<std::string> get(const std::string& key, std::chrono::steady_clock::time_point until) = 0;
};

}  // namespace tessera::comm
