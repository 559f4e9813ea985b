#include "tools/cli/outlet.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace tessera::tools {

void Outlet::write(std::string_view text) {
  if (error_ != 0) return;
  kept_.append(text);
  flush();
}

/// The stream keeps its blocking mode, because other processes share it. A pipe that is ready for writing accepts
/// PIPE_BUF bytes.
void Outlet::flush() {
  while (!empty()) {
    pollfd entry{stream_, POLLOUT, 0};
    if (::poll(&entry, 1, 0) != 1) return;
    const ssize_t count =
        ::write(stream_, kept_.data() + written_, std::min<std::size_t>(kept_.size() - written_, PIPE_BUF));
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
    if (count < 0) {
      error_ = errno;
      kept_.clear();
      written_ = 0;
      return;
    }
    written_ += static_cast<std::size_t>(count);
    if (written_ < kept_.size() && written_ < kMaxPending) continue;
    kept_.erase(0, written_);
    written_ = 0;
  }
}

}  // namespace tessera::tools
