#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tools/cli/output.h"
#include "tools/launch/rank_output.h"

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

/// A vendor's library may print beside the messages of a rank, and a rank may die within a line.
TEST(MessageOfRank, PassesOtherLinesOn) {
  EXPECT_EQ(message_of_rank(R"({"row": 1})")["row"], 1);
  testing::internal::CaptureStderr();
  for (const char* line : {"[1763] ucp_ep.c:1 UCX ERROR", "17", R"({"row": )", ""})
    EXPECT_TRUE(message_of_rank(line).is_null()) << line;
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "[1763] ucp_ep.c:1 UCX ERROR\n17\n{\"row\": \n\n");
}

}  // namespace
}  // namespace tessera::tools
