#include "tools/train/step_recorder.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/stream.h"
#include "tools/cli/output.h"
#include "tools/compare/repeated_run.h"
#include "tools/train/events.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kKeptSteps = 16;
constexpr std::int64_t kWarmUpSteps = 2;
constexpr std::size_t kMostSamples = 400;  // of a rank: more are narrower than a pixel

}  // namespace

StepRecorder::StepRecorder(base::MemoryTracker& memory_tracker) : memory_tracker_(memory_tracker) {
  memory_tracker.keep_history(true);
}

StepRecorder::~StepRecorder() { memory_tracker_.keep_history(false); }

void StepRecorder::begin_step() { begin_ns_ = base::host_time_ns(); }

void StepRecorder::end_step(std::int64_t step, const std::vector<base::TraceEvent>& events) {
  steps_.push_back({step, begin_ns_, base::host_time_ns(), events, memory_tracker_.drain_history()});
  if (steps_.size() > kKeptSteps || (steps_.size() > 1 && steps_.front().number <= kWarmUpSteps)) steps_.pop_front();
}

report::StepTimeline StepRecorder::gather(comm::HostCollectives& control) const {
  std::vector<double> longest(steps_.size(), 0);
  std::vector<double> own;
  for (const Step& step : steps_) own.push_back(static_cast<double>(step.end_ns - step.begin_ns));
  for (const auto& rank : control.gather_all(own))
    for (std::size_t i = 0; i < own.size(); ++i) longest[i] = std::max(longest[i], rank[i]);
  const std::size_t chosen = median_round(longest);
  const Step& step = steps_.at(chosen);

  const std::vector<std::uint64_t> begin = {static_cast<std::uint64_t>(step.begin_ns)};
  std::int64_t first = step.begin_ns, last = step.begin_ns;
  for (const auto& rank : control.gather_all(begin)) {
    first = std::min(first, static_cast<std::int64_t>(rank[0]));
    last = std::max(last, static_cast<std::int64_t>(rank[0]));
  }
  const auto length = static_cast<std::int64_t>(longest[chosen]);
  report::StepTimeline mine{.step = step.number, .length_ns = length, .one_clock = last - first <= length};
  const std::int64_t origin = mine.one_clock ? first : step.begin_ns;
  report::RankTimeline& rank = mine.ranks.emplace_back();
  rank.rank = control.communicator().rank();
  rank.memory = report::samples_of(step.memory, origin, kMostSamples);
  for (base::TraceEvent event : step.events) {
    event.start_ns -= origin;
    event.end_ns -= origin;
    rank.events.push_back(std::move(event));
  }
  report::StepTimeline all = mine;
  all.ranks.clear();
  for (const std::string& text : gather_texts(control, json_text(to_json(mine))))
    all.ranks.push_back(report::parse_timeline(nlohmann::json::parse(text)).ranks.at(0));
  return all;
}

}  // namespace tessera::tools
