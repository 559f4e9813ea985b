// Why a communicator can't be used any more: the first cause, the same on all its ranks.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// The fatal error types, as ranks tell them to each other.
enum class FailureKind : std::uint32_t { none, mismatch, timeout, peer_lost, aborted, system, backend };

struct Failure {
  FailureKind kind = FailureKind::none;
  std::string cause;
};

/// The first failure of any communicator of a rank. When the rank leaves, it tells the others, who may learn of its end
/// on communicators that this failure has not reached. Any thread.
class TESSERA_API FirstFailureRecord {
 public:
  void note(std::string_view cause) noexcept;
  std::string cause() const;  ///< "" while all is well

 private:
  mutable std::mutex mutex_;
  std::string cause_;
};

/// As the exception of its kind; BackendError for none.
[[noreturn]] TESSERA_API void throw_failure(const Failure& failure);

}  // namespace tessera::comm
