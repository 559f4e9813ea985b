// How the wire format handles bytes that this library did not send.
#include "backends/tcp/frame.h"

#include <cstring>
#include <random>

#include "backends/tcp/receive_queue.h"
#include "backends/tcp/send_queue.h"
#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {
namespace {

using comm::tcp::Frame;
using comm::tcp::FrameDecoder;
using comm::tcp::FrameKind;
using comm::tcp::FrameSeal;
using comm::tcp::kCredit;
using comm::tcp::kEagerLimit;
using comm::tcp::kMaxChunk;

using Bytes = std::vector<std::byte>;

FrameSeal checksums() { return FrameSeal(true); }
FrameSeal macs(std::uint8_t key = 1) { return FrameSeal(Digest{key}); }

void append(Bytes& bytes, Frame frame, FrameSeal& seal) {
  Bytes payload(frame.length);
  for (std::size_t i = 0; i < frame.length; ++i) payload[i] = pattern(frame.tag, frame.offset + i);
  if (frame.kind == FrameKind::eager || frame.kind == FrameKind::data) frame.payload_code = seal.payload_code(payload);
  frame.header_code = seal.header_code(frame);
  seal.next_frame();
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
  static std::vector<FrameSeal> seals() {
    std::vector<FrameSeal> both;
    both.push_back(checksums());
    both.push_back(checksums());
    return both;
  }
  explicit Side(FrameSeal seal = checksums()) : reader(receive_queue, std::move(seal)) {
    send_queue.connect(seals());
    for (std::uint32_t i = 0; i < 10; ++i) {
      in.push_back(node.test_message(0, {1, i, 0}, i % 2 == 0 ? 1000 * i : kEagerLimit + 1 + i * 20'000));
      receive_queue.receive(in.back()->message);
    }
  }
};

/// `begins`: receives the offset of each frame.
Bytes good_frames(FrameSeal seal = checksums(), std::vector<std::size_t>* begins = nullptr) {
  Bytes bytes;
  const auto append = [&](Bytes& to, const Frame& frame) {
    if (begins != nullptr) begins->push_back(to.size());
    tcp_test::append(to, frame, seal);
  };
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
    Side side(FrameSeal(false));  // without codes of the contents
    FrameSeal seal = checksums();
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
      append(one, as_sent, seal);
      frame.header_code = seal.header_code(frame);
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
Flip flip(const Bytes& good, std::size_t at, FrameSeal seal, unsigned seed) {
  std::mt19937 random(seed);
  Side side(std::move(seal));
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
  for (const bool keyed : {false, true}) {
    const auto seal = [&] { return keyed ? macs() : checksums(); };
    const Bytes good = good_frames(seal());
    std::mt19937 random(7);
    for (unsigned seed = 0; seed < 400; ++seed) {
      const std::size_t at = seed < sizeof(Frame) ? seed : random() % good.size();  // every byte of a header
      const Flip seen = flip(good, at, seal(), seed);
      EXPECT_TRUE(seen.damaged) << "byte " << at;
      EXPECT_TRUE(seen.intact) << "byte " << at;
    }
  }
}

/// What a device on the way may do to frames that it understands. It computes the checksums of what it has changed.
struct Tampering {
  std::string name;
  std::function<Bytes(Bytes bytes, const std::vector<std::size_t>& begins)> apply;
};

Bytes part(const Bytes& bytes, std::size_t from, std::size_t to) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(from), bytes.begin() + static_cast<std::ptrdiff_t>(to)};
}

Bytes joined(std::initializer_list<Bytes> parts) {
  Bytes all;
  for (const Bytes& one : parts) all.insert(all.end(), one.begin(), one.end());
  return all;
}

std::vector<Tampering> tamperings() {
  return {{"another payload with its checksums",
           [](Bytes bytes, const std::vector<std::size_t>& begins) {
             Frame frame;
             std::memcpy(&frame, bytes.data() + begins[1], sizeof(frame));
             bytes[begins[1] + sizeof(frame)] ^= std::byte{1};
             FrameSeal seal = checksums();
             frame.payload_code = seal.payload_code(std::span(bytes).subspan(begins[1] + sizeof(frame), frame.length));
             frame.header_code = seal.header_code(frame);
             std::memcpy(bytes.data() + begins[1], &frame, sizeof(frame));
             return bytes;
           }},
          {"two frames in the other order",
           [](const Bytes& bytes, const std::vector<std::size_t>& begins) {
             return joined({part(bytes, 0, begins[1]), part(bytes, begins[2], begins[3]),
                            part(bytes, begins[1], begins[2]), part(bytes, begins[3], bytes.size())});
           }},
          {"a frame is missing",
           [](const Bytes& bytes, const std::vector<std::size_t>& begins) {
             return joined({part(bytes, 0, begins[0]), part(bytes, begins[1], bytes.size())});
           }},
          {"the end is missing, but the last frame comes",
           [](const Bytes& bytes, const std::vector<std::size_t>& begins) {
             return joined({part(bytes, 0, begins[4]), part(bytes, begins.back(), bytes.size())});
           }},
          {"a credit comes twice", [](const Bytes& bytes, const std::vector<std::size_t>& begins) {
             const std::size_t credit = begins[begins.size() - 2];
             return joined({part(bytes, 0, begins.back()), part(bytes, credit, bytes.size())});
           }}};
}

TEST(Frames, MacsDetectAnyTampering) {
  std::vector<std::size_t> begins;
  const Bytes good = good_frames(macs(), &begins);
  for (const Tampering& device : tamperings()) {
    std::mt19937 random(3);
    Side side(macs());
    EXPECT_NE(feed(side.reader, device.apply(good, begins), random), "") << device.name;
    EXPECT_TRUE(side.reader.damaged()) << device.name;
    for (const auto& test_message : side.in)
      if (!test_message->done) side.receive_queue.cancel(test_message->message);
  }
  std::mt19937 random(3);
  Side other(macs(2));  // a connection or direction with another key
  EXPECT_EQ(feed(other.reader, good, random), "the header of a message");
  Side same(macs());
  EXPECT_EQ(feed(same.reader, good, random), "");
}

TEST(Frames, ChecksumsMissTampering) {  // negative control
  std::vector<std::size_t> begins;
  const Bytes good = good_frames(checksums(), &begins);
  for (const Tampering& device : tamperings()) {
    std::mt19937 random(3);
    Side side;
    EXPECT_EQ(feed(side.reader, device.apply(good, begins), random), "") << device.name;
    for (const auto& test_message : side.in)
      if (!test_message->done) side.receive_queue.cancel(test_message->message);
  }
}

TEST(Frames, MissFlippedPayloadBitWithoutChecksum) {  // negative control
  const Bytes good = good_frames();
  for (std::size_t byte = 0; byte < sizeof(Frame); ++byte)
    EXPECT_TRUE(flip(good, byte, FrameSeal(false), 1).damaged) << "headers always have one";
  std::size_t wrong = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    // The content of the second frame, after an empty frame and its own header.
    const Flip unseen = flip(good, 2 * sizeof(Frame) + seed * 1000, FrameSeal(false), seed);
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
    FrameSeal seal = checksums();
    for (const Frame& frame : frames) append(bytes, frame, seal);
    EXPECT_EQ(feed(side.reader, bytes, random), wrong);
  }
  std::mt19937 random(1);
  Side side;
  Bytes bytes;
  FrameSeal seal = checksums();
  for (std::uint32_t i = 0; i < 17; ++i)
    append(bytes, {.kind = FrameKind::eager, .tag = {5, i, 0}, .length = kEagerLimit, .total = kEagerLimit}, seal);
  EXPECT_EQ(feed(side.reader, bytes, random), "more eager messages than its credit allows");
}

}  // namespace
}  // namespace tessera::tcp_test
