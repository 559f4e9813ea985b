#include "tessera/comm/failure.h"

#include <new>

#include "tessera/base/error.h"

namespace tessera::comm {

void FirstFailureRecord::record(std::string_view cause) noexcept {
  const std::lock_guard lock(mutex_);
  if (!cause_.empty()) return;
  try {
    cause_ = cause;
  } catch (const std::bad_alloc&) {  // the cause is then not recorded
  }
}

std::string FirstFailureRecord::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void throw_failure(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::mismatch:
      throw Mismatch(failure.cause);
    case FailureKind::timeout:
      throw Timeout(failure.cause);
    case FailureKind::peer_lost:
      throw PeerLost(failure.cause);
    case FailureKind::aborted:
      throw Aborted(failure.cause);
    case FailureKind::system:
      throw SystemError(failure.cause);
    case FailureKind::backend:
    case FailureKind::none:
      break;
  }
  throw BackendError(failure.cause);
}

}  // namespace tessera::comm
