// Why a communicator can't be used any more: the first cause, the same on all its ranks.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/base.h"

namespace tessera::comm {

/// The fatal error types, as ranks tell them to each other.
enum class FailureKind : std::uint32_t { none, mismatch, timeout, peer_lost, aborted, system, backend };

struct Failure {
  FailureKind kind = FailureKind::none;
  std::string cause;
};

/// As the exception of its kind; BackendError for none.
[[noreturn]] TESSERA_API void throw_failure(const Failure& failure);

}  // namespace tessera::comm
