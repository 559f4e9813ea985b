#include "backends/tcp/frame.h"

namespace tessera::comm::tcp {

std::string_view flaw(const Frame& frame) noexcept {
  if (frame.rts_sent > 1 || frame.tag.step >= 1U << 24) return "a frame with invalid fields";
  switch (frame.kind) {
    case FrameKind::eager:
      if (frame.total > kEagerLimit || frame.length != frame.total || frame.offset != 0)
        return "an eager message that is too large or incomplete";
      return "";
    case FrameKind::data:
      if (frame.length > kMaxChunk || frame.offset > frame.total || frame.length > frame.total - frame.offset ||
          (frame.length == 0 && frame.total != 0))
        return "a chunk outside its message";
      return "";
    case FrameKind::cts:
    case FrameKind::rts:
    case FrameKind::credit:
    case FrameKind::close:
      return frame.length == 0 ? "" : "a frame without payload that has a length";
  }
  return "a frame of unknown kind";
}

}  // namespace tessera::comm::tcp
