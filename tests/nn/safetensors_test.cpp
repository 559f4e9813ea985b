// safetensors: round trips, ranges, and malformed files.
#include "tessera/nn/safetensors.h"

#include <gmock/gmock.h>

#include <cstring>

#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;

std::string file(const std::string& header, const std::string& data = "") {
  std::string text(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(header.size() >> (8 * i) & 0xffU);
  return text + header + data;
}

template <class T>
std::string raw(const std::vector<T>& values) {
  std::string text(values.size() * sizeof(T), '\0');
  std::memcpy(text.data(), values.data(), text.size());
  return text;
}

std::vector<float> read(const SafetensorsFile& file, const std::string& name, ElementRange range) {
  std::vector<float> out(static_cast<std::size_t>(range.count()));
  file.read(*file.find(name), range, out.data());
  return out;
}

TEST(Safetensors, WritesAndReadsRanges) {
  const TemporaryDirectory directory;
  const std::string path = directory.path("m.safetensors");
  const std::vector<float> a{1, 2, 3, 4, 5, 6}, b{-7};
  SafetensorsWriter writer(path, {{"a", {2, 3}}, {"scalar", {}}, {"none", {0, 5}}}, {{"format", "pt"}});
  writer.write("scalar", {0, 1}, b.data());
  writer.write("a", {4, 6}, a.data() + 4);
  EXPECT_FALSE(std::filesystem::exists(path));  // no file of that name before it is complete
  EXPECT_THROW(writer.commit(), InvalidUsage);
  writer.write("a", {0, 4}, a.data());
  writer.commit();
  EXPECT_EQ(directory.files(), 1U);
  const SafetensorsFile opened(path);
  EXPECT_EQ(opened.metadata().at("format"), "pt");
  EXPECT_EQ(opened.find("a")->shape, (Shape{2, 3}));
  EXPECT_EQ(read(opened, "a", {0, 6}), a);
  EXPECT_EQ(read(opened, "a", {1, 3}), (std::vector<float>{2, 3}));
  EXPECT_EQ(read(opened, "scalar", {0, 1}), b);
  EXPECT_EQ(opened.find("none")->count(), 0);
  EXPECT_EQ(opened.find("b"), nullptr);
  EXPECT_THROW(read(opened, "a", {5, 7}), InvalidUsage);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(opened.bytes(*opened.find("a")).data()) % 8, 0U);
}

/// What the reference implementation reads, too.
TEST(Safetensors, SpacesUnknownFieldsAndNoMetadataAreRead) {
  const TemporaryDirectory directory;
  const std::string header =
      R"( {"__metadata__":null,"a":{"stride":[1,[{"x":-1.5}]],"dtype":"F32","n":{"shape":[9],"b":null},"shape":[1],"u":7,)"
      R"("data_offsets":[0,4]}} )";
  const SafetensorsFile opened(directory.write("m", file("\n\t " + header, raw(std::vector<float>{2.5F}))));
  EXPECT_EQ(read(opened, "a", {0, 1}), (std::vector<float>{2.5F}));
  EXPECT_TRUE(opened.metadata().empty());
}

TEST(Safetensors, AbandonedWriterKeepsOldFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.write("m.safetensors", "old");
  { const SafetensorsWriter writer(path, {{"a", {1}}}, {}); }
  EXPECT_EQ(directory.files(), 1U);
  EXPECT_EQ(std::filesystem::file_size(path), 3U);
  EXPECT_THROW(SafetensorsWriter(directory.path("no/such/folder"), {}, {}), InvalidUsage);
  EXPECT_THROW(SafetensorsWriter(path, {{"a", {1}}, {"a", {1}}}, {}), InvalidUsage);
}

TEST(Safetensors, ConvertsFloatingDtypes) {
  const TemporaryDirectory directory;
  const std::string header =
      R"({"h":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]},)"
      R"("d":{"dtype":"F64","shape":[1],"data_offsets":[6,14]},"m":{"dtype":"BOOL","shape":[1],"data_offsets":[14,15]}} )";
  const std::string data =
      raw(std::vector<std::uint16_t>{0x3c00, 0xc000, 0x3fc0}) + raw(std::vector<double>{0.1}) + "\1";
  const SafetensorsFile opened(directory.write("m", file(header, data)));
  EXPECT_EQ(read(opened, "h", {0, 2}), (std::vector<float>{1.0F, -2.0F}));
  EXPECT_EQ(read(opened, "b", {0, 1}), (std::vector<float>{1.5F}));
  EXPECT_EQ(read(opened, "d", {0, 1}), (std::vector<float>{0.1F}));
  EXPECT_THAT(error_of<InvalidUsage>([&] { read(opened, "m", {0, 1}); }), HasSubstr("'m' is BOOL"));
}

struct Hostile {
  std::string content;
  std::string message;
};

std::vector<Hostile> hostile_files() {
  const auto tensor = [](const std::string& shape, const std::string& offsets, const std::string& dtype = "F32") {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  const std::string good = tensor("[1]", "[0,4]");
  const std::string deep = R"({"a":)" + std::string(100000, '[');
  return {
      {"", "too few"},
      {"1234567", "too few"},
      {std::string(8, '\xff') + "{}", "a header of 18446744073709551615 bytes"},
      {std::string("\x10\0\0\0\0\0\0\0{}", 10), "a header of 16 bytes"},
      {file(""), "does not begin with '{'"},
      {file("  "), "does not begin with '{'"},
      {file(std::string("{\"a\":{}}\0{}", 11)), "byte 8 is zero"},
      {file("{"), "not JSON"},
      {file("{}x"), "not JSON"},
      {file("{\"a\xff\":1}"), "not JSON"},
      {file("{}", "x"), "trailing data"},
      {file(R"({"a":1})"), "not a tensor"},
      {file(R"({"a":[]})"), "unexpected array"},
      {file(R"({"a":{"b":{}}})"), "unknown dtype ''"},
      {file(R"({"a":{"dtype":{}}})"), "nested too deeply"},
      {file(R"({"a":{"b":)" + std::string(100000, '[')), "nested too deeply"},
      {file(R"({"__metadata__":{"a":null}})"), "is or holds null"},
      {file(deep), "unexpected array"},
      {file(R"({"a":{"shape":)" + std::string(100000, '[')), "unexpected array"},
      {file(R"({"a":)" + good + R"(,"a":)" + good + "}", "1234"), "'a' appears twice"},
      {file(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "1234"), "'dtype' twice"},
      {file(R"({"a":)" + good + "}", "123"), "truncated"},
      {file(R"({"a":)" + good + "}", "12345"), "trailing data"},
      {file(R"({"a":)" + good + R"(,"b":)" + tensor("[1]", "[2,6]") + "}", "123456"), "inside another tensor"},
      {file(R"({"a":)" + good + R"(,"b":)" + tensor("[1]", "[5,9]") + "}", "123456789"), "after a gap"},
      {file(R"({"a":)" + tensor("[2]", "[0,4]") + "}", "1234"), "needs 8 bytes"},
      {file(R"({"a":)" + tensor("[1]", "[4,0]") + "}", "1234"), "needs 4 bytes"},
      {file(R"({"a":)" + tensor("[4294967296,4294967296]", "[0,0]") + "}"), "invalid shape"},
      {file(R"({"a":)" + tensor("[9223372036854775807,2]", "[0,4]") + "}", "1234"), "invalid shape"},
      {file(R"({"a":)" + tensor("[18446744073709551615]", "[0,4]") + "}", "1234"), "'shape' of 'a' holds"},
      {file(R"({"a":)" + tensor("[-1]", "[0,4]") + "}", "1234"), "a negative number"},
      {file(R"({"a":)" + tensor("[1.5]", "[0,4]") + "}", "1234"), "a fraction"},
      {file(R"({"a":)" + tensor("[1]", "[0]") + "}", "1234"), "two data_offsets"},
      {file(R"({"a":)" + tensor("[1]", "[0,4,8]") + "}", "1234"), "two data_offsets"},
      {file(R"({"a":)" + tensor("[1]", "[0,4]", "F31") + "}", "1234"), "unknown dtype 'F31'"},
      {file(R"({"__metadata__":{"a":1}})"), "a number"},
      {file(R"({"a":{"shape":[)" + std::string(10000, '1') + "]}}"), "not JSON"},
  };
}

TEST(Safetensors, RejectsMalformedFilesInOneLine) {
  const TemporaryDirectory directory;
  const std::vector<Hostile> all = hostile_files();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string path = directory.write("hostile", all[i].content);
    const std::string error = error_of<InvalidUsage>([&] { SafetensorsFile opened(path); });
    EXPECT_THAT(error, HasSubstr(all[i].message)) << "file " << i;
    EXPECT_EQ(error.find('\n'), std::string::npos);
    EXPECT_LT(error.size(), 500U);
  }
}

/// Every truncation and every changed byte of a valid file is either rejected or still read within bounds.
TEST(Safetensors, NoDamageReadsOutOfBounds) {
  const TemporaryDirectory directory;
  const std::string good = file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  EXPECT_NO_THROW(SafetensorsFile(directory.write("good", good)));
  std::size_t refused = 0;
  for (std::size_t at = 0; at < good.size(); ++at) {
    EXPECT_THROW(SafetensorsFile(directory.write("cut", good.substr(0, at))), InvalidUsage) << at;
    for (const char change : {'\0', '9', '"', '\x7f', '\xff'}) {
      std::string bad = good;
      bad[at] = change;
      const std::string path = directory.write("bad", bad);
      const std::string error = error_of<InvalidUsage>([&] {
        const SafetensorsFile opened(path);
        for (const SafetensorsEntry& entry : opened.entries()) {
          std::vector<float> out(static_cast<std::size_t>(entry.count()));
          if (entry.dtype == "F32") opened.read(entry, {0, entry.count()}, out.data());
        }
      });
      refused += error.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 150U);
}

}  // namespace
}  // namespace tessera::nn::test
