// The library's errors as PyTorch's.
#pragma once

#include <exception>

namespace tessera::c10d_backend {

/// The same error as one that PyTorch gives a Python type: InvalidUsage becomes ValueError, Unsupported
/// NotImplementedError, PeerLost DistNetworkError, and every other one DistBackendError. The message stays. Errors of
/// others, and null, are returned as they are.
std::exception_ptr as_torch_error(std::exception_ptr error) noexcept;

/// Calls `call`, whose errors of the library leave as PyTorch's.
template <class Call>
auto with_torch_errors(const Call& call) {
  try {
    return call();
  } catch (...) {
    std::rethrow_exception(as_torch_error(std::current_exception()));
  }
}

}  // namespace tessera::c10d_backend
