// How the wire format handles bytes that this library did not send.
#include "backends/tcp/frame.h"

#include <cstring>
#include <random>

#include "backends/tcp/receive_queue.h"
#include "backends/tcp/send_queue.h"
#include "tessera/base/checksum.h"
#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::Frame;
using comm::tcp::FrameDecoder;
using comm::tcp::FrameKind;
using comm::tcp::kCredit;
using comm::tcp::kEagerLimit;
using comm::tcp::kMaxChunk;

using Bytes = std::vector<std::byte>;

void append(Bytes& bytes, Frame frame) {
  Bytes payload(frame.length);
  for (std::size_t i = 0; i < frame.length; ++i) payload[i] = pattern(frame.tag, frame.offset + i);
  frame.payload_sum = checksum(payload);
  frame.header_sum = header_sum_of(frame);
  const auto header = std::as_bytes(std::span(&frame, 1));
  bytes.insert(bytes.end(), header.begin(), header.end());
  bytes.insert(bytes.end(), payload.begin(), payload.end());
}

/// Feeds the bytes in parts of random lengths. Returns the decoder's error, or "".
std::string feed(FrameDecoder& reader, const Bytes& bytes, std::mt19937& random) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::size_t part =
        std::min<std::size_t>(bytes.size() - at, random() % 3 == 0 ? random() % 60 + 1 : random() % 40000 + 1);
    std::size_t taken = 0;
    for (const std::span<std::byte> room : reader.buffers()) {
      const std::size_t n = std::min(part - taken, room.size());
      if (n > 0) std::memcpy(room.data(), bytes.data() + at + taken, n);
      taken += n;
    }
    EXPECT_GT(taken, 0U);
    at += taken;
    if (const std::string_view wrong = reader.decode(taken); !wrong.empty()) return std::string(wrong);
  }
  return "";
}

/// One side of a connection, without the connection: ten receives are posted.
struct Side {
  Node node;
  comm::tcp::SendQueue send_queue;
  comm::tcp::ReceiveQueue receive_queue{send_queue};
  FrameDecoder reader;
  std::vector<std::unique_ptr<TestMessage>> in;
  explicit Side(bool checked = true) : send_queue(2, checked), reader(receive_queue, checked) {
    for (std::uint32_t i = 0; i < 10; ++i) {
      in.push_back(node.test_message(0, {1, i, 0}, i % 2 == 0 ? 1000 * i : kEagerLimit + 1 + i * 20'000));
      receive_queue.receive(in.back()->message);
    }
  }
};

Bytes good_frames() {
  Bytes bytes;
  for (std::uint32_t i = 0; i < 10; ++i) {
    const std::size_t total = i % 2 == 0 ? 1000 * i : kEagerLimit + 1 + i * 20'000;
    if (i % 2 == 0) {
      append(bytes, {.kind = FrameKind::eager, .tag = {1, i, 0}, .length = 1000 * i, .total = total});
      continue;
    }
    for (std::size_t offset = 0; offset < total; offset += 50'000)
      append(bytes, {.kind = FrameKind::data,
                     .tag = {1, i, 0},
                     .length = static_cast<std::uint32_t>(std::min<std::size_t>(50'000, total - offset)),
                     .total = total,
                     .offset = offset});
  }
  append(bytes, {.kind = FrameKind::eager, .tag = {2, 0, 0}, .length = 30'000, .total = 30'000});
  append(bytes, {.kind = FrameKind::rts, .tag = {2, 1, 0}});
  append(bytes, {.kind = FrameKind::cts, .tag = {2, 2, 0}});
  append(bytes, {.kind = FrameKind::credit});
  append(bytes, {.kind = FrameKind::close});
  return bytes;
}

TEST(Frames, AreDecodedFromAnyFragments) {  // control of the tests below
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    Side side;
    EXPECT_EQ(feed(side.reader, good_frames(), random), "");
    EXPECT_EQ(side.node.finished, 10U);
    for (const auto& test_message : side.in) EXPECT_TRUE(intact(*test_message, test_message->memory.size()));
    EXPECT_TRUE(side.reader.close_received());
  }
}

TEST(Frames, RejectRandomBytes) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    std::mt19937 random(seed);
    Side side;
    Bytes bytes(5000);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    EXPECT_EQ(feed(side.reader, bytes, random), "bytes that are not a frame of this version");
  }
}

TEST(Frames, SurviveRandomHeaders) {
  std::size_t refused = 0, accepted = 0;
  for (unsigned seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(seed);
    Side side(false);  // without checksums of the contents
    Bytes bytes;
    const auto any = [&](std::initializer_list<std::uint64_t> values) {
      return *(values.begin() + random() % values.size());
    };
    for (std::uint32_t i = 0; i < 1 + seed % 8; ++i) {
      Frame frame;
      frame.kind = static_cast<FrameKind>(random() % 50 == 0 ? random() % 9 : random() % 5 + 1);
      frame.tag = {static_cast<std::uint32_t>(any({1, 1, 1, 2})), static_cast<std::uint32_t>(random() % 12), 0};
      frame.rts_sent = static_cast<std::uint16_t>(random() % 40 == 0 ? random() % 3 : 0);
      frame.total = any({0, 1, 1000, 2000, 64'000, kEagerLimit, 85'537, 125'537, kMaxChunk, ~std::uint64_t{0},
                         std::uint64_t{1} << 40});
      frame.length = static_cast<std::uint32_t>(random() % 2 == 0
                                                    ? std::min<std::uint64_t>(frame.total, kMaxChunk)
                                                    : any({0, 1, 5000, kMaxChunk, kMaxChunk + 1, ~std::uint32_t{0}}));
      if (frame.kind != FrameKind::eager && frame.kind != FrameKind::data && random() % 8 != 0) frame.length = 0;
      frame.offset = random() % 2 == 0 ? 0 : any({1, 1000, frame.total - frame.length, ~std::uint64_t{0}});
      frame.consumed = random() % 30 == 0 ? random() : 0;
      Frame as_sent = frame;
      if (as_sent.length > kMaxChunk) as_sent.length = 10;
      Bytes one;
      append(one, as_sent);
      frame.header_sum = header_sum_of(frame);
      std::memcpy(one.data(), &frame, sizeof(frame));
      bytes.insert(bytes.end(), one.begin(), one.end());
    }
    (feed(side.reader, bytes, random).empty() ? accepted : refused) += 1;
    EXPECT_LE(side.receive_queue.held(), kCredit);
    for (const auto& test_message : side.in)
      if (!test_message->done) side.receive_queue.cancel(test_message->message);
  }
  EXPECT_GT(refused, 300U);
  EXPECT_GT(accepted, 30U);
}

TEST(Frames, SurviveFlippedBits) {
  const Bytes good = good_frames();
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Side side;
    Bytes bytes(good.begin(), good.begin() + 400'000);
    std::memcpy(bytes.data(), good.data(), bytes.size());
    for (int i = 0; i < 8; ++i) {
      const std::size_t at = i < 4 ? random() % 200 : random() % bytes.size();
      bytes[at] ^= static_cast<std::byte>(1U << random() % 8);
    }
    EXPECT_NE(feed(side.reader, bytes, random), "");
    EXPECT_TRUE(side.reader.damaged());
    EXPECT_LE(side.receive_queue.held(), kCredit);
  }
}

/// Flips one bit of a frame; the bytes arrive in chunks, so that content is compared in parts and as a whole.
struct Flip {
  bool damaged = false;
  bool intact = false;  ///< of every complete message
};
Flip flip(const Bytes& good, std::size_t at, bool checked, unsigned seed) {
  std::mt19937 random(seed);
  Side side(checked);
  Bytes bytes = good;
  bytes[at] ^= static_cast<std::byte>(1U << random() % 8);
  feed(side.reader, bytes, random);
  Flip result{side.reader.damaged(), true};
  for (const auto& test_message : side.in) {
    if (test_message->done)
      result.intact &= intact(*test_message, test_message->memory.size());
    else
      side.receive_queue.cancel(test_message->message);
  }
  return result;
}

TEST(Frames, DetectsAnyFlippedBit) {
  const Bytes good = good_frames();
  std::mt19937 random(7);
  for (unsigned seed = 0; seed < 400; ++seed) {
    const std::size_t at = seed < 64 ? seed : random() % good.size();  // every byte of a header
    const Flip seen = flip(good, at, true, seed);
    EXPECT_TRUE(seen.damaged) << "byte " << at;
    EXPECT_TRUE(seen.intact) << "byte " << at;
  }
}

TEST(Frames, MissFlippedPayloadBitWithoutChecksum) {  // negative control
  const Bytes good = good_frames();
  for (std::size_t byte = 0; byte < sizeof(Frame); ++byte)
    EXPECT_TRUE(flip(good, byte, false, 1).damaged) << "headers always have one";
  std::size_t wrong = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    // The content of the second frame, after an empty frame and its own header.
    const Flip unseen = flip(good, 2 * sizeof(Frame) + seed * 1000, false, seed);
    EXPECT_FALSE(unseen.damaged);
    wrong += unseen.intact ? 0 : 1;
  }
  EXPECT_EQ(wrong, 20U);
}

TEST(Frames, RejectProtocolViolations) {
  const Frame eager{.kind = FrameKind::eager, .tag = {1, 2, 0}, .length = 2000, .total = 2000};
  const Frame unrequested{.kind = FrameKind::data, .tag = {3, 3, 3}, .length = 10, .total = 10};
  const Frame cts{.kind = FrameKind::cts, .tag = {3, 3, 3}};
  const Frame rts{.kind = FrameKind::rts, .tag = {3, 3, 3}};
  const Frame chunk{.kind = FrameKind::data, .tag = {1, 1, 0}, .length = 100'000, .total = 165'637};
  const Frame whole{.kind = FrameKind::data, .tag = {1, 1, 0}, .length = 100'000, .total = 165'637, .offset = 50'000};
  const Frame other{.kind = FrameKind::data, .tag = {1, 1, 0}, .length = 10, .total = 165'638, .offset = 100'000};
  const Frame close{.kind = FrameKind::close};
  Frame greedy;
  greedy.consumed = 1;
  const std::vector<std::pair<std::vector<Frame>, std::string>> cases = {
      {{greedy}, "a credit for more than was sent"},
      {{unrequested}, "a chunk of a message that was not requested"},
      {{cts, cts}, "two CTS for one message"},
      {{rts, rts}, "two RTS for one message"},
      {{chunk, whole}, "more bytes than the message has"},
      {{chunk, other}, "chunks with different lengths of their message"},
      {{close, eager}, "bytes after its last frame"}};
  for (const auto& [frames, wrong] : cases) {
    std::mt19937 random(1);
    Side side;
    Bytes bytes;
    for (const Frame& frame : frames) append(bytes, frame);
    EXPECT_EQ(feed(side.reader, bytes, random), wrong);
  }
  std::mt19937 random(1);
  Side side;
  Bytes bytes;
  for (std::uint32_t i = 0; i < 17; ++i)
    append(bytes, {.kind = FrameKind::eager, .tag = {5, i, 0}, .length = kEagerLimit, .total = kEagerLimit});
  EXPECT_EQ(feed(side.reader, bytes, random), "more eager messages than its credit allows");
}

}  // namespace
}  // namespace tessera::tcp_test
