#include "tessera/base/error.h"

#include <cerrno>
#include <system_error>

namespace tessera::base {

// Out of line, so that each class has a single type information across modules.
Error::~Error() = default;
InvalidUsage::~InvalidUsage() = default;
Unsupported::~Unsupported() = default;
Mismatch::~Mismatch() = default;
Timeout::~Timeout() = default;
PeerLost::~PeerLost() = default;
Aborted::~Aborted() = default;
BackendError::~BackendError() = default;
SystemError::~SystemError() = default;

void throw_error(std::string_view kind, const std::string& text) {
  if (kind == "InvalidUsage") throw InvalidUsage(text);
  if (kind == "Unsupported") throw Unsupported(text);
  if (kind == "Mismatch") throw Mismatch(text);
  if (kind == "Timeout") throw Timeout(text);
  if (kind == "PeerLost") throw PeerLost(text);
  if (kind == "Aborted") throw Aborted(text);
  if (kind == "BackendError") throw BackendError(text);
  throw SystemError(text);
}

SystemError system_error(std::string_view what, int code) {
  if (code < 0) code = errno;
  return SystemError(std::string(what) + ": " + std::generic_category().message(code));
}

}  // namespace tessera::base
