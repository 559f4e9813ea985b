// The first error of a communicator, the same on all its ranks.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// The fatal error types, as encoded in messages between ranks.
enum class FailureKind : std::uint32_t {
  none,       ///< no failure
  mismatch,   ///< Mismatch
  timeout,    ///< Timeout
  peer_lost,  ///< PeerLost
  aborted,    ///< Aborted
  system,     ///< SystemError
  backend     ///< BackendError
};

/// A failure of a communicator; none by default.
struct Failure {
  FailureKind kind = FailureKind::none;  ///< `none`: no failure
  std::string cause;                     ///< the text of the exception, the same on all ranks
};

/// The first failure of any communicator of a rank. When the rank leaves, it sends this cause to the other ranks, which
/// may notice its end on communicators that this failure has not reached. Thread-safe.
class TESSERA_API FirstFailureRecord {
 public:
  void record(std::string_view cause) noexcept;  ///< keeps the first cause and ignores later ones
  std::string cause() const;                     ///< "" without a failure

 private:
  mutable std::mutex mutex_;
  std::string cause_;
};

/// Throws the exception of its kind; BackendError for none.
[[noreturn]] TESSERA_API void throw_failure(const Failure& failure);

}  // namespace tessera::comm
