#include "tessera/base/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <stdexcept>

namespace tessera::base {
namespace {

using nlohmann::json;

TEST(TraceRecorder, KeepsOrderOfStart) {
  const auto stream = make_immediate_stream();
  TraceRecorder recorder(3);
  const auto outer = recorder.begin(TraceEventKind::forward, "h.0", 64, *stream);
  recorder.mark(TraceEventKind::reshard, "h.0", 32, *stream);
  recorder.end(outer, *stream);
  const auto records = recorder.drain();
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].kind, TraceEventKind::forward);
  EXPECT_EQ(records[0].unit, "h.0");
  EXPECT_EQ(records[0].rank, 3);
  EXPECT_EQ(records[0].bytes, 64U);
  EXPECT_LE(records[0].start_ns, records[1].start_ns);
  EXPECT_GE(records[0].end_ns, records[1].end_ns);
  EXPECT_EQ(records[1].duration_ns(), 0);
  EXPECT_TRUE(recorder.drain().empty());
}

TEST(TraceRecorder, DropsUnfinishedEvents) {
  const auto stream = make_immediate_stream();
  TraceRecorder recorder(0);
  recorder.begin(TraceEventKind::forward, "lost", 0, *stream);
  recorder.mark(TraceEventKind::reshard, "kept", 0, *stream);
  const auto records = recorder.drain();
  ASSERT_EQ(records.size(), 1U);
  EXPECT_EQ(records[0].unit, "kept");
}

TEST(TraceRecorder, TimesLazyStreamWhenWorkRuns) {
  const auto stream = make_lazy_stream();
  TraceRecorder recorder(0);
  bool ran = false;
  const auto span = recorder.begin(TraceEventKind::backward, "root", 0, *stream);
  stream->run([&] { ran = true; });
  recorder.end(span, *stream);
  EXPECT_FALSE(ran) << "recording waits for nothing";
  const std::int64_t issued = host_time_ns();
  const auto records = recorder.drain();
  EXPECT_TRUE(ran);
  ASSERT_EQ(records.size(), 1U);
  EXPECT_GE(records[0].start_ns, issued) << "the time is when the stream got there, not when it was told";
}

TEST(TraceRecorder, FailedStreamLeavesNoUnfinishedEvents) {
  const auto stream = make_lazy_stream();
  TraceRecorder recorder(0);
  recorder.mark(TraceEventKind::reshard, "a", 0, *stream);
  const auto span = recorder.begin(TraceEventKind::forward, "b", 0, *stream);
  stream->run([] { throw std::runtime_error("lost"); });
  recorder.end(span, *stream);
  EXPECT_THROW(recorder.drain(), std::runtime_error);
  EXPECT_TRUE(recorder.drain().empty());
}

json trace_of(const std::vector<TraceEvent>& records) {
  std::ostringstream out;
  write_chrome_trace(out, records);
  return json::parse(out.str());
}

TEST(ChromeTrace, IsJsonWithTrackPerRankAndKind) {
  const std::vector<TraceEvent> records = {{TraceEventKind::unshard_issue, "h.0", 0, 4096, 5'000, 6'000},
                                           {TraceEventKind::unshard_wait, "h.0", 0, 0, 6'000, 8'500},
                                           {TraceEventKind::forward, "h.0", 0, 0, 8'500, 20'000},
                                           {TraceEventKind::reduce_issue, "h.0", 1, 4096, 30'000, 30'000},
                                           {TraceEventKind::optimizer_step, "root", 1, 0, 31'000, 32'000}};
  const json trace = trace_of(records);
  std::set<std::pair<int, std::string>> tracks;
  std::vector<json> events;
  for (const json& entry : trace.at("traceEvents")) {
    if (entry.at("ph") != "M") {
      events.push_back(entry);
    } else if (entry.at("name") == "thread_name") {
      tracks.emplace(entry.at("pid").get<int>(), entry.at("args").at("name").get<std::string>());
    }
  }
  EXPECT_THAT(tracks,
              testing::UnorderedElementsAre(std::pair(0, "gather"), std::pair(0, "waiting"), std::pair(0, "compute"),
                                            std::pair(1, "reduce"), std::pair(1, "compute")));
  ASSERT_EQ(events.size(), 5U);
  EXPECT_EQ(events[0].at("ts"), 0.0);
  EXPECT_EQ(events[0].at("dur"), 1.0);
  EXPECT_EQ(events[2].at("ts"), 3.5);
  EXPECT_EQ(events[2].at("name"), "forward h.0");
  EXPECT_EQ(events[2].at("cat"), "forward");
  EXPECT_EQ(events[0].at("args").at("bytes"), 4096);
  EXPECT_EQ(events[3].at("ph"), "i") << "an event without duration is an instant";
  EXPECT_FALSE(events[3].contains("dur"));
}

TEST(ChromeTrace, TransfersHaveRowsOfTheirOwnWithoutOverlap) {
  const std::vector<TraceEvent> records = {{TraceEventKind::forward, "h.0", 3, 0, 5'000, 9'000}};
  const std::vector<TransferEvent> transfers = {{"all_gather", "shard", 3, 64, 5'000, 6'000, 8'000},
                                                {"reduce_scatter", "shard", 3, 32, 6'500, 7'000, 9'000},
                                                {"all_gather", "shard", 3, 16, 5'500, 8'000, 8'500},
                                                {"all_reduce", "replicate", 3, 8, 7'000, 7'000, 7'500}};
  std::ostringstream out;
  write_chrome_trace(out, records, transfers);
  std::map<int, std::string> rows;
  std::map<std::string, std::vector<json>> events;
  const json trace = json::parse(out.str());
  for (const json& entry : trace.at("traceEvents")) {
    if (entry.at("ph") != "M")
      events[rows.at(entry.at("tid").get<int>())].push_back(entry);
    else if (entry.at("name") == "thread_name")
      rows[entry.at("tid").get<int>()] = entry.at("args").at("name").get<std::string>();
  }
  ASSERT_EQ(events.size(), 4U);
  EXPECT_EQ(events["compute"].size(), 1U) << "the rows of a run stay as they are";
  ASSERT_EQ(events["transfers shard"].size(), 2U) << "the third begins when the first is done";
  EXPECT_EQ(events["transfers shard 2"].at(0).at("name"), "reduce_scatter");
  EXPECT_EQ(events["transfers replicate"].at(0).at("ts"), 2.0);
  const json& later = events["transfers shard"].at(1);
  EXPECT_EQ(later.at("dur"), 0.5);
  EXPECT_EQ(later.at("pid"), 3);
  EXPECT_EQ(later.at("args"), json({{"axis", "shard"}, {"bytes", 16}, {"called", 0.5}, {"begun", 3.0}, {"done", 3.5}}));
}

TEST(ChromeTrace, EmptyAndHostileNamesStayJson) {
  EXPECT_TRUE(trace_of({}).at("traceEvents").empty());
  const json trace = trace_of({{TraceEventKind::forward, "a\"b\\\n\xff", 0, 0, 0, 1}});
  EXPECT_EQ(trace.at("traceEvents").size(), 3U);
}

TEST(TraceEventKind, NamesAreFixed) {
  EXPECT_EQ(name_of(TraceEventKind::unshard_issue), "unshard_issue");
  EXPECT_EQ(name_of(TraceEventKind::optimizer_step), "optimizer_step");
}

}  // namespace
}  // namespace tessera::base
