#include "tessera/base/log.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

TEST(Log, LevelsRoundTrip) {
  for (const char* name : {"debug", "info", "warn", "error", "off"}) EXPECT_EQ(name_of(parse_log_level(name)), name);
  EXPECT_THROW(parse_log_level("loud"), InvalidUsage);
}

TEST(Log, WritesItsLevelAndAbove) {
  std::vector<std::string> lines;
  Logger logger(LogLevel::warn, [&](LogLevel, std::string_view text) { lines.emplace_back(text); });
  logger.write(LogLevel::debug, "a");
  logger.write(LogLevel::info, "b");
  logger.write(LogLevel::warn, "c");
  logger.write(LogLevel::error, "d");
  EXPECT_EQ(lines, (std::vector<std::string>{"c", "d"}));
}

TEST(Log, OffIsSilent) {
  int calls = 0;
  Logger logger(LogLevel::off, [&](LogLevel, std::string_view) { ++calls; });
  logger.write(LogLevel::error, "x");
  logger.write(LogLevel::off, "x");
  EXPECT_EQ(calls, 0);
}

TEST(Log, SurvivesThrowingSinkAndNoSink) {
  int calls = 0;
  Logger logger(LogLevel::debug, [&](LogLevel, std::string_view) {
    ++calls;
    throw std::runtime_error("disk full");
  });
  logger.write(LogLevel::info, "x");
  logger.write(LogLevel::info, "y");
  EXPECT_EQ(calls, 2);
  Logger(LogLevel::debug, nullptr).write(LogLevel::error, "nobody listens");
}

TEST(Log, SinkCallsAreSerialized) {
  std::vector<int> unguarded;  // tsan would detect the data race, the count the lost element
  Logger logger(LogLevel::debug, [&](LogLevel, std::string_view) { unguarded.push_back(1); });
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) logger.write(LogLevel::info, "line");
    });
  threads.clear();
  EXPECT_EQ(unguarded.size(), 4000U);
}

}  // namespace
}  // namespace tessera::base
