#include "tools/results/step_timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"

#include "tools/pages/page.h"

namespace tessera::tools::pages {
namespace {

using base::MemoryCategory;
using base::TraceEventKind;
using testing::HasSubstr;

StepTimeline two_ranks() {
  StepTimeline step{.step = 5, .length_ns = 3'000'000, .pieces = {2, 2, 2}, .predicted_state = 800};
  for (int rank = 0; rank < 2; ++rank)
    step.ranks.push_back({rank,
                          {{TraceEventKind::unshard_issue, "root", rank, 100, 0, 10},
                           {TraceEventKind::forward, "h.0</script>", rank, 100, 10, 2'000'000}},
                          {{{"all_gather", "shard", rank, 100, 0, 5, 900}, 0}},
                          {{0, {200}}, {50, {200, 0, 0, 300}}}});
  return step;
}

TEST(StepTimeline, RoundTripKeepsAll) {
  const nlohmann::json json = to_json(two_ranks());
  const StepTimeline read = parse_timeline({json, "t"});
  EXPECT_EQ(to_json(read), to_json(two_ranks()));
  EXPECT_EQ(read.ranks.at(1).events.at(1).unit, "h.0</script>");
  EXPECT_EQ(read.ranks.at(1).events.at(1).end_ns, 2'000'000);
  EXPECT_EQ(read.ranks.at(1).memory.at(1).total(), 500);
  StepTimeline other = two_ranks();  // the negative control: one byte
  other.ranks[1].memory[1].bytes[3] += 1;
  EXPECT_NE(to_json(read), to_json(other));
}

TEST(StepTimeline, RefusesNumbersOutOfRange) {
  const auto error = [](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json json = to_json(two_ranks());
    change(json);
    try {
      parse_timeline({json, "t"});
    } catch (const base::InvalidUsage& refused) {
      return std::string(refused.what());
    }
    return std::string();
  };
  EXPECT_EQ(error([](auto&) {}), "");  // the control
  EXPECT_EQ(error([](auto& j) { j["ranks"][0]["events"][0][1] = 99; }),
            "t: ranks[0].events[0][1] is 99; needs a whole number from 0 to 1");
  EXPECT_THAT(error([](auto& j) { j["ranks"][0]["events"][0][0] = 99; }), HasSubstr("events[0][0] is 99"));
  EXPECT_THAT(error([](auto& j) { j["ranks"][0]["events"][0][3] = -1; }), HasSubstr("events[0][3] is -1"));
  EXPECT_THAT(error([](auto& j) { j["ranks"][0]["events"][0][4] = -1; }), HasSubstr("events[0][4] is -1"));
  EXPECT_THAT(error([](auto& j) { j["ranks"][0]["transfers"][0][6] = 2; }), HasSubstr("transfers[0][6] is 2"));
  EXPECT_THAT(error([](auto& j) { j["ranks"][1]["memory"][0] = {1, 2}; }), HasSubstr("memory[0] has 2 elements"));
  EXPECT_THAT(error([](auto& j) { j["pieces"][0] = 0; }), HasSubstr("pieces[0] is 0; needs a whole number from 1"));
  EXPECT_THAT(error([](auto& j) { j["pieces"][2] = -1; }), HasSubstr("pieces[2] is -1"));
  EXPECT_THAT(error([](auto& j) { j["pieces"] = {1, 2}; }), HasSubstr("needs an array of 3"));
  EXPECT_THAT(error([](auto& j) { j["length_ns"] = 1e300; }), HasSubstr("length_ns is 1e+300"));
}

TEST(StepTimeline, FewSamplesKeepThePeak) {
  base::MemoryHistory history;
  history.before[0] = 1000;
  for (int i = 0; i < 5000; ++i) {
    history.changes.push_back({100 + i, MemoryCategory::activation, i == 3333 ? 70 : 7});
    history.changes.push_back({100 + i, MemoryCategory::activation, i == 3333 ? -70 : -7});
  }
  history.changes.push_back({9000, MemoryCategory::offloaded, 1'000'000});
  const std::vector<MemorySample> samples = samples_of(history, 100, 40);
  EXPECT_LE(samples.size(), 41U);
  const auto highest = std::max_element(samples.begin(), samples.end(),
                                        [](const auto& a, const auto& b) { return a.total() < b.total(); });
  EXPECT_EQ(highest->total(), 1070);
  EXPECT_EQ(highest->at_ns, 3333);
  EXPECT_EQ(samples.back().total(), 1000) << "offloaded bytes are in another memory";
  // The negative control: every 250th sample would miss it.
  history.changes[2 * 3333].bytes = 7;
  history.changes[2 * 3333 + 1].bytes = -7;
  for (const MemorySample& sample : samples_of(history, 100, 40)) EXPECT_LE(sample.total(), 1007);
}

TEST(StepTimeline, PageOfOneStepHoldsItsData) {
  const RunResult run{.strategy = "fsdp", .units = {{"root", 50}, {"h.0</script>", 50}}, .timeline = two_ranks()};
  const std::string page = page_of_step({{.title = "one step"}}, {run});
  EXPECT_NE(page.find("data-picture=\"map\""), std::string::npos);
  EXPECT_NE(page.find("h.0\\u003c/script>"), std::string::npos) << "a name can't end the script element";
  EXPECT_EQ(page.find("h.0</script>"), std::string::npos);
}

}  // namespace
}  // namespace tessera::tools::pages
