#include "tools/launch/rank_output.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::tools {
namespace {

std::vector<std::string> split(const std::vector<std::string>& chunks) {
  std::vector<std::string> lines;
  const auto on_line = [&](std::string_view line) { lines.emplace_back(line); };
  LineSplitter splitter;
  for (const std::string& chunk : chunks) splitter.feed(chunk, on_line);
  splitter.finish(on_line);
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
  const std::string chunk(LineSplitter::kMaxLine / 2, 'x');
  const auto lines = split({chunk, chunk, "tail"});
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0].size(), LineSplitter::kMaxLine);
  EXPECT_EQ(lines[1], "tail");
}

}  // namespace
}  // namespace tessera::tools
