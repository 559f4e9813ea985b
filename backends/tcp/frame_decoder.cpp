#include "backends/tcp/frame_decoder.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::tcp {

FrameDecoder::Buffers FrameDecoder::buffers() {
  Buffers buffers;
  if (target_ != nullptr) buffers[0] = sink_.room_for(*target_, frame_.offset + done_, frame_.length - done_);
  direct_ = buffers[0];
  // If the target has less room than the payload, the rest goes to the staging buffer, which is also correct.
  buffers[1] = std::span(staging_).subspan(end_);
  return buffers;
}

std::string_view FrameDecoder::decode(std::size_t bytes) {
  const std::size_t direct = std::min(bytes, direct_.size());
  if (direct > 0)
    if (const std::string_view wrong = advance(direct_.first(direct)); !wrong.empty()) return wrong;
  end_ += bytes - direct;
  return end_ > begin_ ? read_staged() : "";
}

/// Accounts for bytes of the payload that are in their final place.
std::string_view FrameDecoder::advance(std::span<const std::byte> bytes) {
  done_ += bytes.size();
  if (seal_.payloads() && !verified_) seal_.add(bytes);
  return done_ < frame_.length ? "" : end_payload();
}

std::string_view FrameDecoder::end_payload() {
  if (seal_.payloads() && !verified_ && !same(seal_.payload_code(), frame_.payload_code))
    return damage("the payload of a message");
  seal_.next_frame();
  sink_.frame_ends(*target_, frame_.length);
  target_ = nullptr;
  return "";
}

std::string_view FrameDecoder::damage(std::string_view what) noexcept {
  damaged_ = true;
  return what;
}

std::string_view FrameDecoder::read_header() {
  std::memcpy(&frame_, staging_.data() + begin_, sizeof(Frame));
  begin_ += sizeof(Frame);
  if (frame_.magic != Frame::kMagic) return damage("bytes that are not a frame of this version");
  if (!same(seal_.header_code(frame_), frame_.header_code)) return damage("the header of a message");
  if (closed_) return "bytes after its last frame";
  if (const std::string_view wrong = flaw(frame_); !wrong.empty()) return wrong;
  closed_ = frame_.kind == FrameKind::close;
  if (const std::string_view wrong = sink_.frame_begins(frame_, target_); !wrong.empty()) return wrong;
  if (target_ != nullptr) return begin_payload();
  seal_.next_frame();
  return "";
}

/// A payload that is completely staged is verified before any target memory is written.
std::string_view FrameDecoder::begin_payload() {
  done_ = 0;
  verified_ = end_ - begin_ >= frame_.length;
  if (seal_.payloads() && !verified_)
    seal_.begin_payload();
  else if (seal_.payloads() &&
           !same(seal_.payload_code({staging_.data() + begin_, frame_.length}), frame_.payload_code))
    return damage("the payload of a message");
  return frame_.length == 0 ? end_payload() : "";
}

std::string_view FrameDecoder::read_staged() {
  while (begin_ < end_) {
    std::string_view wrong;
    if (target_ != nullptr) {
      const std::size_t most = std::min<std::size_t>(end_ - begin_, frame_.length - done_);
      const std::span<std::byte> room = sink_.room_for(*target_, frame_.offset + done_, most);
      std::memcpy(room.data(), staging_.data() + begin_, room.size());
      begin_ += room.size();
      wrong = advance(room);
    } else if (end_ - begin_ < sizeof(Frame)) {
      break;
    } else {
      wrong = read_header();
    }
    if (!wrong.empty()) return wrong;
  }
  std::memmove(staging_.data(), staging_.data() + begin_, end_ - begin_);  // at most a part of a header
  end_ -= begin_;
  begin_ = 0;
  return "";
}

}  // namespace tessera::comm::tcp
