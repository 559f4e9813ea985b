#include "tessera/base/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

using std::chrono::milliseconds;

template <class F>
std::string usage_error(F&& f) {
  try {
    f();
  } catch (const InvalidUsage& error) {
    return error.what();
  }
  return "(accepted)";
}

TEST(ParseSize, PowersOfTwo) {
  EXPECT_EQ(parse_size("0", "x"), 0U);
  EXPECT_EQ(parse_size("4096", "x"), 4096U);
  EXPECT_EQ(parse_size("64K", "x"), 65536U);
  EXPECT_EQ(parse_size("8M", "x"), 8U << 20);
  EXPECT_EQ(parse_size("1G", "x"), 1U << 30);
}

TEST(ParseSize, ErrorsHaveNameAndValue) {
  for (const char* text :
       {"", "K", "-1", "1k", "1KB", "1.5M", " 1", "1 ", "0x10", "9223372036854775808", "9000000000G", "+1"})
    EXPECT_THAT(
        usage_error([&] { parse_size(text, "--max-bytes"); }),
        testing::AllOf(testing::StartsWith("--max-bytes: '" + std::string(text) + "'"), testing::HasSubstr("64K")));
}

TEST(ParseDuration, Units) {
  EXPECT_EQ(parse_duration("500ms", "x"), milliseconds(500));
  EXPECT_EQ(parse_duration("6s", "x"), milliseconds(6000));
  EXPECT_EQ(parse_duration("2m", "x"), milliseconds(120'000));
  EXPECT_EQ(parse_duration("1h", "x"), milliseconds(3'600'000));
}

TEST(ParseDuration, ErrorsHaveNameAndValue) {
  for (const char* text : {"", "5", "0s", "-1s", "1.5s", "5 s", "5S", "s", "99999999999h"})
    EXPECT_THAT(usage_error([&] { parse_duration(text, "TESSERA_TIMEOUT"); }),
                testing::AllOf(testing::StartsWith("TESSERA_TIMEOUT: '" + std::string(text) + "'"),
                               testing::HasSubstr("500ms")));
}

TEST(ParseInteger, EnforcesLimits) {
  EXPECT_EQ(parse_integer("1", "x", 1, 3), 1);
  EXPECT_EQ(parse_integer("3", "x", 1, 3), 3);
  EXPECT_EQ(parse_integer("-2", "x", -2, 3), -2);
  for (const char* text : {"0", "4", "", "two", "1x", "1.0", "99999999999999999999"})
    EXPECT_THAT(usage_error([&] { parse_integer(text, "--ranks", 1, 3); }),
                "--ranks: '" + std::string(text) + "' is not a whole number from 1 to 3");
  EXPECT_THAT(usage_error([] { parse_integer("0", "--steps", 1, std::numeric_limits<std::int64_t>::max()); }),
              testing::EndsWith("from 1 or more"));
}

TEST(ParseFlag, AcceptsBothValuesOnly) {
  for (const char* text : {"1", "true", "on", "yes"}) EXPECT_TRUE(parse_flag(text, "x"));
  for (const char* text : {"0", "false", "off", "no"}) EXPECT_FALSE(parse_flag(text, "x"));
  for (const char* text : {"", "2", "TRUE", "y"}) EXPECT_THROW(parse_flag(text, "x"), InvalidUsage) << text;
}

TEST(Format, IsShortestTextThatRoundTrips) {
  EXPECT_EQ(format_duration(milliseconds(500)), "500ms");
  EXPECT_EQ(format_duration(milliseconds(6000)), "6s");
  EXPECT_EQ(format_duration(milliseconds(300'000)), "5m");
  EXPECT_EQ(format_duration(milliseconds(7'200'000)), "2h");
  EXPECT_EQ(format_size(0), "0");
  EXPECT_EQ(format_size(65536), "64K");
  EXPECT_EQ(format_size(8U << 20), "8M");
  EXPECT_EQ(format_size(3ULL << 30), "3G");
  EXPECT_EQ(format_size(12345), "12345");
  for (const std::int64_t ms : {1LL, 999LL, 1000LL, 1001LL, 61'000LL, 90'000LL, 3'600'000LL, 3'660'000LL})
    EXPECT_EQ(parse_duration(format_duration(milliseconds(ms)), "x"), milliseconds(ms));
  for (const std::uint64_t bytes : {1ULL, 1023ULL, 1024ULL, 1025ULL, 1ULL << 20, (1ULL << 30) + 1024, 5ULL << 40})
    EXPECT_EQ(parse_size(format_size(bytes), "x"), bytes);
}

}  // namespace
}  // namespace tessera::base
