#include "tools/launch/rank_output.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::tools {
namespace {

std::vector<std::string> split(const std::vector<std::string>& pieces) {
  std::vector<std::string> lines;
  const auto take = [&](std::string_view line) { lines.emplace_back(line); };
  LineSplitter splitter;
  for (const std::string& piece : pieces) splitter.feed(piece, take);
  splitter.finish(take);
  return lines;
}

using Lines = std::vector<std::string>;

TEST(LineSplitter, JoinsFragments) {
  EXPECT_EQ(split({"a", "b\nc", "\n\nd"}), (Lines{"ab", "c", "", "d"}));
  EXPECT_EQ(split({"\n", "\n"}), (Lines{"", ""}));
  EXPECT_EQ(split({"x\n"}), (Lines{"x"}));
  EXPECT_EQ(split({}), Lines{});
}

TEST(LineSplitter, TruncatesEndlessLines) {
  const std::string piece(LineSplitter::kLongest / 2, 'x');
  const auto lines = split({piece, piece, "tail"});
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].size(), LineSplitter::kLongest);
  EXPECT_EQ(lines[1], "tail");
}

}  // namespace
}  // namespace tessera::tools
