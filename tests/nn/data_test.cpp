// Token files, batch order and evaluation windows.
#include "tessera/nn/data.h"

#include <gmock/gmock.h>

#include <set>

#include "tessera/nn/kernels/cross_entropy.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;

std::string counting(std::size_t count, char first = 0) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += static_cast<char>(first + static_cast<char>(i));
  return text;
}

std::shared_ptr<const TokenDataset> bytes(const std::vector<std::string>& paths) {
  return std::make_shared<const TokenDataset>(paths, TokenFormat::bytes, 256);
}

std::vector<std::int32_t> values(const Tensor& t) {
  return {t.data<std::int32_t>(), t.data<std::int32_t>() + t.count()};
}

TEST(TokenFiles, AreReadAsOneSequence) {
  const TemporaryDirectory directory;
  const auto files = bytes({directory.write("a", "abc"), directory.write("b", "d"),
                            directory.write("c",
                                            "\xff"
                                            "f")});
  EXPECT_EQ(files->size(), 6);
  std::vector<std::int32_t> out(5);
  files->read(1, 5, out.data());
  EXPECT_EQ(out, (std::vector<std::int32_t>{'b', 'c', 'd', 255, 'f'}));
  EXPECT_THROW(files->read(2, 5, out.data()), InvalidUsage);
}

TEST(TokenFiles, LastTenthIsForValidation) {
  const TemporaryDirectory directory;
  const auto files = bytes({directory.write("a", counting(109))});
  EXPECT_EQ(files->training().end, 98);
  EXPECT_EQ(files->validation().begin, 98);
  EXPECT_EQ(files->validation().end, 109);
}

TEST(TokenFiles, IdsAreCheckedAgainstVocabulary) {
  const TemporaryDirectory directory;
  const std::string path = directory.write("ids", std::string("\x01\x00\x00\x02", 4));
  const TokenDataset files({path}, TokenFormat::u16, 513);
  std::vector<std::int32_t> out(2);
  files.read(0, 2, out.data());
  EXPECT_EQ(out, (std::vector<std::int32_t>{1, 512}));
  EXPECT_THAT(error_of<InvalidUsage>([&] { TokenDataset({path}, TokenFormat::u16, 512); }),
              HasSubstr("token 512 is outside"));
  EXPECT_NO_THROW(TokenDataset({path}, TokenFormat::u32, 1 << 26));
  EXPECT_THROW(TokenDataset({path}, TokenFormat::u32, 1 << 25), InvalidUsage);
}

template <class T>
std::string ids(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

TEST(TokenFiles, OtherKindsAreRecognizedByTheirContent) {
  const TemporaryDirectory directory;
  const auto error = [&](const std::string& content, TokenFormat format) {
    const std::string path = directory.write("data", content);
    return error_of<InvalidUsage>([&] { TokenDataset({path}, format, 60000); });
  };
  std::vector<std::uint16_t> narrow;
  std::vector<std::uint32_t> wide;
  std::vector<std::uint64_t> widest;
  for (std::uint32_t i = 0; i < 200; ++i) {
    narrow.push_back(static_cast<std::uint16_t>(i * 499 % 50257));
    wide.push_back(i * 499 % 50257);
    widest.push_back(i * 499 % 50257);
  }
  const std::string text =
      "It was a bright cold day in April, and the clocks were striking thirteen; caf\u00e9s closed.";
  const std::string jsonl = "{\"text\": \"a bright cold day\"}\n{\"text\": \"in April\"}\n";
  // The controls: each kind in its own format.
  EXPECT_EQ(error(text, TokenFormat::bytes), "");
  EXPECT_EQ(error("{\"not\": lines}\nof JSON", TokenFormat::bytes), "");
  EXPECT_EQ(error(ids(narrow), TokenFormat::u16), "");
  EXPECT_EQ(error(ids(wide), TokenFormat::u32), "");
  EXPECT_THAT(error(text, TokenFormat::u16), HasSubstr("is text"));
  EXPECT_THAT(error(text.substr(0, 88), TokenFormat::u32), HasSubstr("is text"));
  EXPECT_THAT(error(ids(narrow), TokenFormat::bytes), HasSubstr("give --data-format u16"));
  EXPECT_THAT(error(ids(wide), TokenFormat::u16), HasSubstr("give --data-format u32"));
  EXPECT_THAT(error(ids(widest), TokenFormat::u16), HasSubstr("ids of 64 bits"));
  EXPECT_THAT(error(ids(widest), TokenFormat::u32), HasSubstr("ids of 64 bits"));
  const std::string book = "{\"text\": \"" + std::string(2U << 20U, 'a') + "\"}\n";
  for (const std::string& json : std::vector<std::string>{
           jsonl, "\n" + jsonl, "\xef\xbb\xbf" + jsonl, "{\"text\": \"one line\"}", book + book,
           jsonl.substr(0, 29) + "\n" + book, std::string("[\n  {\"text\" : \"April\"}\n]"), "[1, 2]\n[3]\n" + text})
    EXPECT_THAT(error(json, TokenFormat::bytes), HasSubstr("is JSON, not text")) << json.substr(0, 40);
  for (const std::string& prose :
       std::vector<std::string>{"[1] A footnote.\n" + text, "[1]\n" + text,
                                "{\n  \"name\": \"a source\"\n}\nint main() {}", "{" + std::string(2U << 20U, 'a')})
    EXPECT_EQ(error(prose, TokenFormat::bytes), "") << prose.substr(0, 40);
  for (const TokenFormat format : {TokenFormat::bytes, TokenFormat::u16}) {
    EXPECT_THAT(error(std::string("\xff\xfeI\0t\0 \0", 8), format), HasSubstr("UTF-16"));
    EXPECT_THAT(error(std::string("\xfe\xff\0I\0t\0 ", 8), format), HasSubstr("UTF-16"));
    EXPECT_THAT(error(std::string(257, 'x') + "ustar" + std::string(250, 'x'), format), HasSubstr("tar"));
  }
  // Ids below 8, as of bases or labels: their upper halves are zeros, and those of 16 bits have none.
  std::vector<std::uint16_t> bases(200);
  for (std::size_t i = 0; i < bases.size(); ++i) bases[i] = static_cast<std::uint16_t>(i * 7 % 5);
  EXPECT_EQ(error(ids(bases), TokenFormat::u16), "");
  EXPECT_THAT(error(ids(std::vector<std::uint32_t>(bases.begin(), bases.end())), TokenFormat::u16),
              HasSubstr("give --data-format u32"));
  EXPECT_THAT(error(ids(std::vector<std::uint64_t>(bases.begin(), bases.end())), TokenFormat::u32),
              HasSubstr("ids of 64 bits"));
  for (const auto& [magic, name] : {std::pair(std::string("\x93NUMPY\x01\x00"), ".npy"),
                                    {std::string("\x1f\x8b\x08\x00", 4), "gzip"},
                                    {std::string("\x28\xb5\x2f\xfd"), "zstd"},
                                    {std::string("PAR1"), "Parquet"},
                                    {std::string("PK\x03\x04"), "zip"}})
    for (const TokenFormat format : {TokenFormat::bytes, TokenFormat::u16})
      EXPECT_THAT(error(magic + std::string(200, 'x'), format), HasSubstr(name));
}

TEST(TokenFiles, HashIsOfAllFilesInTheirOrder) {
  const TemporaryDirectory directory;
  const std::string a = directory.write("a", "abc"), b = directory.write("b", "d");
  EXPECT_EQ(bytes({a, b})->hash(), bytes({directory.write("c", "abcd")})->hash());
  EXPECT_NE(bytes({a, b})->hash(), bytes({b, a})->hash());
  EXPECT_NE(bytes({a})->hash(), bytes({directory.write("d", "abd")})->hash());
}

TEST(TokenFiles, ErrorsAreOneLine) {
  const TemporaryDirectory directory;
  const auto error = [&](const std::vector<std::string>& paths, TokenFormat format = TokenFormat::bytes,
                         std::int64_t vocabulary = 256) {
    return error_of<InvalidUsage>([&] { TokenDataset(paths, format, vocabulary); });
  };
  EXPECT_THAT(error({directory.path("none")}), HasSubstr("No such file"));
  EXPECT_THAT(error({directory.path()}), HasSubstr("not a regular file"));
  EXPECT_THAT(error({directory.write("empty", "")}), HasSubstr("is empty"));
  EXPECT_THAT(error({directory.write("odd", "abc")}, TokenFormat::u16), HasSubstr("not a multiple of 2"));
  EXPECT_THAT(error({directory.write("text", "abc")}, TokenFormat::bytes, 100), HasSubstr("256 or more"));
  EXPECT_THROW(parse_token_format("u8"), InvalidUsage);
  const auto files = bytes({directory.write("short", "abcd")});
  EXPECT_THAT(
      error_of<InvalidUsage>([&] { BatchSampler(files, {.range = files->all(), .positions = 4, .global_batch = 1}); }),
      HasSubstr("needs at least 5"));
  EXPECT_NO_THROW(BatchSampler(files, {.range = files->all(), .positions = 3, .global_batch = 1}));
}

TEST(Batches, RanksTogetherReadDataOfOneRank) {
  const TemporaryDirectory directory;
  const auto files = bytes({directory.write("a", counting(200))});
  const BatchSampler batches(files, {.range = {10, 150}, .positions = 7, .global_batch = 6, .seed = 3});
  Context context;
  const TokenBatch whole = batches.batch(context, 5, {0, 6});
  std::vector<std::int32_t> parts;
  for (std::int64_t rank = 0; rank < 3; ++rank)
    for (const std::int32_t token : values(batches.batch(context, 5, {2 * rank, 2 * rank + 2}).tokens))
      parts.push_back(token);
  EXPECT_EQ(parts, values(whole.tokens));
  for (std::int64_t i = 0; i < whole.tokens.count(); ++i)
    EXPECT_EQ(values(whole.targets)[static_cast<std::size_t>(i)],
              values(whole.tokens)[static_cast<std::size_t>(i)] + 1);
}

TEST(Batches, DependOnSeedAndStepAndStayInRange) {
  const TemporaryDirectory directory;
  const auto files = bytes({directory.write("a", counting(100))});
  const auto windows = [&](std::uint64_t seed, std::int64_t step) {
    const BatchSampler batches(files, {.range = {20, 60}, .positions = 30, .global_batch = 50, .seed = seed});
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < 50; ++i) out.push_back(batches.window(step, i));
    return out;
  };
  EXPECT_EQ(windows(1, 1), windows(1, 1));
  EXPECT_NE(windows(1, 1), windows(2, 1));
  EXPECT_NE(windows(1, 1), windows(1, 2));
  std::set<std::int64_t> seen;
  for (std::int64_t step = 1; step <= 20; ++step)
    for (const std::int64_t start : windows(1, step)) seen.insert(start);
  EXPECT_EQ(*seen.begin(), 20);  // every position with room for 30 inputs and one more target, and no other
  EXPECT_EQ(*seen.rbegin(), 29);
  EXPECT_EQ(seen.size(), 10U);
}

TEST(SequentialWindows, SplitFileAndDropRemainder) {
  const TemporaryDirectory directory;
  const auto files = bytes({directory.write("a", counting(15))});
  const SequentialSampler windows(files, files->all(), 4);
  EXPECT_EQ(windows.count(), 3);  // 12 inputs; the 13th begins no complete window
  EXPECT_EQ(SequentialSampler(files, {0, 13}, 4).count(), 3);
  EXPECT_EQ(SequentialSampler(files, {0, 12}, 4).count(), 2);  // the third window would lack its last target
  Context context;
  const TokenBatch batch = windows.batch(context, {2, 4});
  EXPECT_EQ(values(batch.tokens), (std::vector<std::int32_t>{8, 9, 10, 11, 0, 0, 0, 0}));
  const std::int32_t ignore = kernels::kIgnoreIndex;
  EXPECT_EQ(values(batch.targets), (std::vector<std::int32_t>{9, 10, 11, 12, ignore, ignore, ignore, ignore}));
  EXPECT_THROW(SequentialSampler(files, files->all(), 15), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::test
