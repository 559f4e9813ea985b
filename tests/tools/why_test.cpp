// Why one run is slower: steps cut without gaps, terms that add up, and causes that move their own terms.
#include "tools/results/why.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tools/compare/compare.h"
#include "tools/train/measurements.h"

namespace tessera::tools {
namespace {

using base::TraceEvent;
using base::TraceEventKind;
using comm::LinkRecord;
using comm::LinkWait;
using testing::HasSubstr;
using testing::Not;

constexpr std::int64_t kMs = 1'000'000;

TraceEvent event(TraceEventKind kind, std::int64_t begin_ms, std::int64_t end_ms) {
  return {.kind = kind, .unit = "h.0", .start_ns = begin_ms * kMs, .end_ns = end_ms * kMs};
}

LinkWait wait_of(std::int64_t begin, std::int64_t called, std::int64_t through, std::int64_t end) {
  return {begin * kMs, called * kMs, through * kMs, end * kMs};
}

/// A root with a child, whose gather is waited for and decoded, an update, and what is around them.
const std::vector<TraceEvent> kStep = {
    event(TraceEventKind::unshard_issue, 1, 2),   event(TraceEventKind::forward, 2, 30),
    event(TraceEventKind::unshard_issue, 3, 5),   event(TraceEventKind::unshard_wait, 5, 15),
    event(TraceEventKind::forward, 15, 20),       event(TraceEventKind::reshard, 20, 20),
    event(TraceEventKind::backward, 30, 40),      event(TraceEventKind::reduce_wait, 41, 43),
    event(TraceEventKind::optimizer_step, 45, 48)};
const LinkRecord kLink{.calls = {{1 * kMs, 4 * kMs, kMs}, {2 * kMs, 8 * kMs, 2 * kMs}, {60 * kMs, kMs, kMs}},
                       .waits = {wait_of(5, 7, 11, 14), wait_of(41, 30, 35, 43)}};

TEST(StepParts, AreWhatTheThreadDidInnermost) {
  const StepParts parts = cut_step(0, 50 * kMs, kStep, kLink);
  EXPECT_NEAR(parts.compute, (28 - 2 - 10 - 5) + 5 + 10, 1e-9);
  EXPECT_NEAR(parts.optimizer, 3, 1e-9);
  EXPECT_NEAR(parts.issue, 1 + 2 + 1, 1e-9);  // the last is a decoding: from 14 to 15
  EXPECT_NEAR(parts.late, 2, 1e-9);
  EXPECT_NEAR(parts.exposed, 4, 1e-9);
  EXPECT_NEAR(parts.transport, 3 + 2, 1e-9);  // the second wait began when all was through
  EXPECT_NEAR(parts.rest, 1 + 1 + 2 + 2, 1e-9);
  EXPECT_NEAR(parts.step(), 50, 1e-9);
  EXPECT_EQ(parts.volume, 12);  // without the call after the step
  EXPECT_EQ(parts.latency, 3);
  EXPECT_EQ(parts.hidden(), 15 - 4);
}

/// For each nanosecond, the kind of the last begun event that holds it: slower, and another way.
std::map<int, int> count_by_kind(const std::vector<TraceEvent>& events, int end) {
  std::map<int, int> counts;
  for (int now = 0; now < end; ++now) {
    int kind = -1;
    for (const TraceEvent& e : events)
      if (e.start_ns <= now && now < e.end_ns) kind = static_cast<int>(e.kind);
    ++counts[kind];
  }
  return counts;
}

void nest(std::mt19937& random, std::vector<TraceEvent>& events, int begin, int end, int depth) {
  constexpr TraceEventKind kKinds[] = {TraceEventKind::forward, TraceEventKind::optimizer_step,
                                       TraceEventKind::unshard_issue};
  for (int now = begin; now < end;) {
    const int from = now + static_cast<int>(random() % 4);
    const int to = std::min(end, from + static_cast<int>(random() % 20));
    if (from >= to) break;
    events.push_back({.kind = kKinds[random() % 3], .start_ns = from, .end_ns = to});
    if (depth > 0) nest(random, events, from, to, depth - 1);
    now = to;
  }
}

TEST(StepParts, OfRandomStepsAreThoseOfEachNanosecond) {
  std::mt19937 random(1);
  int changed = 0;
  for (int i = 0; i < 200; ++i) {
    std::vector<TraceEvent> events;
    nest(random, events, 0, 100, 3);
    const StepParts parts = cut_step(0, 100, events, {});
    std::map<int, int> counts = count_by_kind(events, 100);
    EXPECT_NEAR(parts.compute * 1e6, counts[static_cast<int>(TraceEventKind::forward)], 1e-6);
    EXPECT_NEAR(parts.optimizer * 1e6, counts[static_cast<int>(TraceEventKind::optimizer_step)], 1e-6);
    EXPECT_NEAR(parts.issue * 1e6, counts[static_cast<int>(TraceEventKind::unshard_issue)], 1e-6);
    EXPECT_NEAR(parts.rest * 1e6, counts[-1], 1e-6);
    // The control: one event less gives other parts.
    events.resize(events.empty() ? 0 : events.size() - 1);
    const StepParts other = cut_step(0, 100, events, {});
    changed += other.compute != parts.compute || other.optimizer != parts.optimizer || other.issue != parts.issue;
  }
  EXPECT_GT(changed, 100);
}

double sum_of(const Why& why) {
  double sum = 0;
  for (const WhyTerm& term : why.terms) sum += term.ms;
  return sum;
}

double term(const Why& why, const std::string& name) {
  for (const WhyTerm& one : why.terms)
    if (one.name == name) return one.ms;
  ADD_FAILURE() << name;
  return 0;
}

StepParts random_parts(std::mt19937& random) {
  StepParts parts;
  for (const auto& [name, part] : kStepParts) parts.*part = std::uniform_real_distribution<double>(0, 100)(random);
  return parts;
}

TEST(Why, TermsAddUpToTheGap) {
  std::mt19937 random(2);
  for (const std::size_t rounds : {1U, 2U, 6U, 9U}) {
    std::vector<StepParts> from, to;
    for (std::size_t i = 0; i < rounds; ++i) {
      from.push_back(random_parts(random));
      to.push_back(random_parts(random));
    }
    Why why = explain_gap(from, to);
    EXPECT_NEAR(sum_of(why), why.gap_ms, 1e-9);
    EXPECT_NEAR(why.gap_ms, why.to_ms - why.from_ms, 1e-9);
    EXPECT_EQ(why.rounds, rounds - 2 * (rounds / 4));
    why.terms.erase(why.terms.begin() + 2);  // the control: a term that is dropped is missed
    EXPECT_GT(std::abs(sum_of(why) - why.gap_ms), 1e-3);
  }
  EXPECT_THROW(explain_gap({}, {}), base::InvalidUsage);
}

TEST(Why, EachPartMovesItsOwnTerm) {
  std::mt19937 random(3);
  const StepParts from = random_parts(random);
  const std::map<std::string, std::vector<std::string>> moved = {
      {"compute", {"contention"}}, {"optimizer", {"optimizer"}},      {"issue", {"copies"}},
      {"late", {"late"}},          {"exposed", {"overlap"}},          {"transport", {"transport"}},
      {"rest", {"rest"}},          {"volume", {"volume", "overlap"}}, {"latency", {"latency", "overlap"}}};
  for (const auto& [name, part] : kStepParts) {
    StepParts to = from;
    to.*part += 5;
    const Why why = explain_gap({&from, 1}, {&to, 1});
    const std::vector<std::string>& expected = moved.at(name);
    for (const WhyTerm& one : why.terms) {
      double ms = 0;
      if (one.name == expected.front()) ms = 5;
      // What is sent and not waited for is hidden.
      if (expected.size() == 2 && one.name == "overlap") ms = -5;
      EXPECT_NEAR(one.ms, ms, 1e-9) << name << " moves " << one.name;
      EXPECT_EQ(one.shown(), ms != 0) << name << " moves " << one.name;
    }
  }
}

TEST(Why, LeavesOutTheOuterRounds) {
  std::vector<StepParts> from(8), to(8);
  for (std::size_t i = 0; i < 8; ++i) to[i].compute = i == 3 ? 1e6 : 10;  // one round in which another program ran
  const Why why = explain_gap(from, to);
  EXPECT_NEAR(why.gap_ms, 10, 1e-9);
  EXPECT_NEAR(term(why, "contention"), 10, 1e-9);
  EXPECT_EQ(why.terms[4].interval.low, 10);
  EXPECT_EQ(why.terms[4].interval.high, 1e6);  // the interval is over all of them
}

TEST(Why, TextAndJsonHaveTheTerms) {
  StepParts from, to;
  from.compute = 10;
  to.compute = 12;
  to.late = 1;
  std::vector<StepParts> a(6, from), b(6, to);
  b[0].late = -1;  // so that this term may be 0
  Why why = explain_gap(a, b);
  why.from = "ddp";
  why.to = "fsdp";
  why.link = "20us,20MB/s";
  why.helps = {{"as it is", 12, 2, 100}, {"zero2", 11, 1, 200}};
  const std::string text = why_text(why);
  EXPECT_THAT(text, HasSubstr("Why a step of fsdp takes 3.000 ms more than one of ddp (links of 20us,20MB/s; means of "
                              "the middle 4 rounds):\n"));
  EXPECT_THAT(text, HasSubstr("contention  "));
  EXPECT_THAT(text, HasSubstr("may be 0: waits until the last rank had called"));
  EXPECT_THAT(text, Not(HasSubstr("may be 0: forward and backward themselves")));
  EXPECT_THAT(why_text(explain_gap({a.data(), 5}, {b.data(), 5})), HasSubstr("; means of 3 rounds, too few to tell"));
  EXPECT_THAT(why_text(explain_gap({a.data(), 5}, {b.data(), 5})), Not(HasSubstr(" to +")));
  nlohmann::json older = to_json(why);
  const Why read = parse_why({older, "w"});
  EXPECT_EQ(to_json(read), to_json(why));
  older.erase("coverage");
  EXPECT_EQ(parse_why({older, "w"}).coverage, 0) << "so that its intervals claim nothing";
  EXPECT_EQ(to_json(why).at("terms").at("contention"), 2);
  EXPECT_EQ(to_json(why).at("helps")[1].at("gap_ms"), 1);
}

void run_two_ranks(const std::function<void(comm::Communicator&)>& body) {
  comm::InitOptions config;
  config.backend = "shm";
  config.timeout = std::chrono::seconds(60);
  config.algorithms = "";
  comm::run_threads(2, config, body);
}

/// What rank 0 waits for in an all_gather that rank 1 calls `late` after it.
StepParts wait_for_rank_1(std::chrono::milliseconds late) {
  StepParts parts;
  run_two_ranks([&](comm::Communicator& world) {
    const auto slow = comm::slow_links(world.split(0, world.rank()),
                                       {.link = {std::chrono::milliseconds(1), 1e6}, .intra = {}, .record = true});
    world.barrier().wait();
    const std::int64_t begin = base::host_time_ns();
    if (world.rank() == 1) std::this_thread::sleep_for(late);
    const std::vector<std::uint8_t> in(10'000);  // 10 ms
    std::vector<std::uint8_t> out(2 * in.size());
    slow->all_gather(comm::view_of(in.data(), in.size()), comm::view_of(out.data(), out.size())).wait();
    const std::int64_t end = base::host_time_ns();
    if (world.rank() == 0) parts = cut_step(begin, end, {}, comm::take_record(*slow));
    if (world.rank() == 0) {
      EXPECT_TRUE(comm::take_record(*slow).calls.empty()) << "taken before";
    } else {
      EXPECT_EQ(comm::take_record(*slow).waits.size(), 1U);
    }
  });
  return parts;
}

TEST(Why, RankThatSleepsIsLate) {
  const StepParts together = wait_for_rank_1({}), apart = wait_for_rank_1(std::chrono::milliseconds(200));
  EXPECT_NEAR(apart.volume, 10, 1e-6);
  EXPECT_NEAR(apart.latency, 1, 1e-6);
  EXPECT_NEAR(apart.exposed, 11, 1);  // what the link needs after both have called
  EXPECT_GE(apart.late, 150);
  const Why why = explain_gap({&together, 1}, {&apart, 1});
  EXPECT_NEAR(sum_of(why), why.gap_ms, 1e-9);
  EXPECT_GT(term(why, "late"), 100);
  EXPECT_EQ(term(why, "volume"), 0);
  // The control: nobody sleeps, and nearly nothing is late.
  EXPECT_LT(together.late, 100);
}

TEST(Why, FitsOfLinksAreTheirFigures) {
  LinkSpec fit{.latency_us = 1e9};
  const auto is_close = [&] { return fit.latency_us <= 2600 && fit.bytes_per_second >= 45e6; };
  for (int attempt = 0; attempt < 10 && !is_close(); ++attempt)  // a busy machine only adds time
    run_two_ranks([&](comm::Communicator& world) {
      const auto slow =
          comm::slow_links(world.split(0, world.rank()), {.link = {std::chrono::milliseconds(2), 50e6}, .intra = {}});
      const LinkSpec own = fit_link(*slow);
      if (world.rank() == 0) fit = own;
    });
  EXPECT_NEAR(fit.latency_us, 2000, 600);
  EXPECT_NEAR(fit.bytes_per_second, 50e6, 5e6);
  EXPECT_GT(fit.latency_us, 2000 - 20);  // a link is never early
}

TEST(Why, FitsGiveRunsVolumeAndLatency) {
  RunResult a, b;
  a.wire_bytes_per_step = {.all_gather = 1'000'000, .reduce_scatter = 500'000, .all_reduce = 0, .control = 99};
  a.calls_per_step = {.all_gather = 4, .reduce_scatter = 3, .all_reduce = 0, .control = 9};
  b.wire_bytes_per_step = {.all_gather = 0, .reduce_scatter = 0, .all_reduce = 2'000'000, .control = 99};
  b.calls_per_step = {.all_gather = 0, .reduce_scatter = 0, .all_reduce = 5, .control = 9};
  a.parts = b.parts = StepParts{.exposed = 1, .transport = 2};
  a.link_fit = {10, 100e6};
  b.link_fit = {30, 50e6};
  const comm::SlowLinks links = apply_link_fits({&a, &b});
  EXPECT_EQ(links.link.latency, std::chrono::microseconds(20));
  EXPECT_NEAR(links.link.bytes_per_second, 2 / (1 / 100e6 + 1 / 50e6), 1);
  EXPECT_NEAR(a.parts->volume, 1.5e6 * (1 / 100e6 + 1 / 50e6) / 2 * 1e3, 1e-9);
  EXPECT_NEAR(a.parts->latency, 7 * 0.020, 1e-12);
  EXPECT_NEAR(b.parts->latency, 10 * 0.020, 1e-12);
  EXPECT_EQ(a.parts->exposed, 3);
  EXPECT_EQ(a.parts->transport, 0);
  EXPECT_EQ(a.parts->step(), 3);
}

TEST(Why, LinksRecordOnlyIfAsked) {
  run_two_ranks([&](comm::Communicator& world) {
    const auto slow =
        comm::slow_links(world.split(0, world.rank()), {.link = {std::chrono::milliseconds(1), 1e6}, .intra = {}});
    slow->barrier().wait();
    EXPECT_TRUE(comm::take_record(*slow).calls.empty());
    EXPECT_TRUE(comm::take_record(*slow).waits.empty());
    EXPECT_THROW(comm::take_record(world), base::InvalidUsage);
  });
}

}  // namespace
}  // namespace tessera::tools
