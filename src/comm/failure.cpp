#include "tessera/comm/failure.h"

#include "tessera/base/error.h"

namespace tessera::comm {

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
