// A bounded, repeatable run of the fuzzer's properties: every seed, every prefix of it, and many mutations.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "tests/fuzz/wire_properties.h"

namespace tessera::fuzz {
namespace {

class Mutator {
 public:
  std::string mutated(std::string bytes) {
    for (std::size_t times = 1 + draw(4); times > 0 && !bytes.empty(); --times) change(bytes);
    return bytes;
  }
  std::size_t draw(std::size_t below) { return std::uniform_int_distribution<std::size_t>(0, below - 1)(random_); }

 private:
  void change(std::string& bytes) {
    const std::size_t at = draw(bytes.size());
    const std::string few(1 + draw(9), static_cast<char>(draw(256)));
    switch (draw(6)) {
      case 0:
        bytes[at] = static_cast<char>(draw(256));
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << draw(8)));
        break;
      case 2:
        bytes.insert(at, few);
        break;
      case 3:
        bytes.erase(at, 1 + draw(9));
        break;
      case 4:
        bytes.replace(at, few.size(), few);
        break;
      default:
        bytes.insert(at, bytes.substr(draw(bytes.size()), draw(64)));
        break;
    }
  }
  std::mt19937_64 random_{20240607};
};

/// "" or the property that the first failing input violates.
std::string run(const std::vector<Again>& all, int mutations) {
  const std::vector<std::string> from = seeds();
  for (const std::string& seed : from)
    for (std::size_t length = 0; length <= seed.size(); length += 1 + length / 64)
      if (const std::string broken = broken_property(std::string_view(seed).substr(0, length), all); !broken.empty())
        return broken;
  Mutator mutator;
  for (int i = 0; i < mutations; ++i)
    if (const std::string broken = broken_property(mutator.mutated(from[mutator.draw(from.size())]), all);
        !broken.empty())
      return broken;
  return "";
}

TEST(Wire, AcceptsAnyBytes) { EXPECT_EQ(run(messages(), 60'000), ""); }

TEST(Wire, AcceptsMessagesOfRanks) {
  std::size_t taken = 0;
  for (const std::string& seed : seeds())
    for (const Again& message : messages()) taken += message(seed) ? 1 : 0;
  EXPECT_GE(taken, 10u);
}

TEST(Wire, BlobsAreCountedAndWhole) {
  using namespace comm::protocol;
  const std::vector<std::string> blobs = {"first", "", std::string("with\0zero", 9)};
  const std::string whole = encode_blobs(blobs);
  EXPECT_EQ(whole.substr(0, 9), std::string("\x05\0\0\0first", 9));
  EXPECT_EQ(decode_blobs(whole, 3), blobs);
  EXPECT_EQ(decode_blobs("", 0), std::vector<std::string>());
  EXPECT_EQ(decode_blobs(whole, 2), std::nullopt) << "one too many";
  EXPECT_EQ(decode_blobs(whole, 4), std::nullopt) << "one is missing";
  EXPECT_EQ(decode_blobs(whole + "x", 3), std::nullopt) << "too long";
  for (std::size_t length = 0; length < whole.size(); ++length)
    EXPECT_EQ(decode_blobs(whole.substr(0, length), 3), std::nullopt) << "only " << length << " bytes";
  EXPECT_EQ(decode_blobs(std::string(4, '\xff'), 1), std::nullopt) << "a length beyond the end";
}

TEST(Wire, ManyBlobsFitTheLengthOfAFrame) {
  using namespace comm::protocol;
  EXPECT_EQ(max_blobs(1), kMaxExchange + 4);
  EXPECT_EQ(max_blobs(512), 512 * (kMaxExchange + 4));
  EXPECT_EQ(max_blobs(std::size_t{1} << 62), 0xFFFF'FFFFU);
}

/// The control: the same run detects readers with typical mistakes.
TEST(Wire, DetectsPlantedMistake) {
  using namespace comm::protocol;
  const Again ignores_the_rest = [](std::string_view payload) -> std::optional<std::string> {
    if (payload.size() < 4) return std::nullopt;
    const auto rank = decode_rank(payload.substr(0, 4));
    return rank ? std::optional(encode_rank(*rank)) : std::nullopt;
  };
  const Again trusts_the_length = [](std::string_view payload) -> std::optional<std::string> {
    if (payload.size() < 4) return std::nullopt;
    const std::size_t length = static_cast<std::uint8_t>(payload[2]);
    return encode(ChannelOpened{
        static_cast<std::uint16_t>(static_cast<std::uint8_t>(payload[0]) + 256 * static_cast<std::uint8_t>(payload[1])),
        std::string(payload.substr(4, length))});
  };
  EXPECT_EQ(run({ignores_the_rest}, 20'000), "a message is not what was sent");
  EXPECT_EQ(run({trusts_the_length}, 20'000), "a message is not what was sent");
}

}  // namespace
}  // namespace tessera::fuzz

/// test_fuzz_wire --seeds DIR writes the initial corpus of libFuzzer.
int main(int count, char** arguments) {
  if (count == 3 && std::string_view(arguments[1]) == "--seeds") {
    std::filesystem::create_directories(arguments[2]);
    int number = 0;
    for (const std::string& seed : tessera::fuzz::seeds())
      std::ofstream(std::filesystem::path(arguments[2]) / std::to_string(number++), std::ios::binary) << seed;
    return 0;
  }
  testing::InitGoogleTest(&count, arguments);
  return RUN_ALL_TESTS();
}
