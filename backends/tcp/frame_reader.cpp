#include "backends/tcp/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace tessera::tcp {

FrameReader::Buffers FrameReader::buffers() {
  Buffers buffers;
  if (target_ != nullptr) buffers[0] = sink_.room_for(*target_, frame_.offset + done_, frame_.length - done_);
  direct_ = buffers[0].size();
  // Where the target had less room than the frame has payload, its rest would land in the staging buffer: also right.
  buffers[1] = std::span(staging_).subspan(end_);
  return buffers;
}

std::string_view FrameReader::take(std::size_t bytes) {
  const std::size_t direct = std::min(bytes, direct_);
  if (direct > 0) advance(direct);
  end_ += bytes - direct;
  return end_ > begin_ ? take_staged() : "";
}

void FrameReader::advance(std::size_t bytes) {
  done_ += bytes;
  if (done_ < frame_.length) return;
  sink_.frame_ends(*target_, frame_.length);
  target_ = nullptr;
}

std::string_view FrameReader::take_staged() {
  while (begin_ < end_) {
    if (target_ != nullptr) {
      const std::size_t most = std::min<std::size_t>(end_ - begin_, frame_.length - done_);
      const std::span<std::byte> room = sink_.room_for(*target_, frame_.offset + done_, most);
      std::memcpy(room.data(), staging_.data() + begin_, room.size());
      begin_ += room.size();
      advance(room.size());
      continue;
    }
    if (end_ - begin_ < sizeof(Frame)) break;
    std::memcpy(&frame_, staging_.data() + begin_, sizeof(Frame));
    begin_ += sizeof(Frame);
    if (bye_) return "bytes behind its last";
    if (const std::string_view wrong = flaw(frame_); !wrong.empty()) return wrong;
    bye_ = frame_.kind == FrameKind::bye;
    if (const std::string_view wrong = sink_.frame_begins(frame_, target_); !wrong.empty()) return wrong;
    done_ = 0;
    if (target_ != nullptr && frame_.length == 0) advance(0);
  }
  std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);  // at most a part of a header
  end_ -= begin_;
  begin_ = 0;
  return "";
}

}  // namespace tessera::tcp
