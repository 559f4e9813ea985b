#include "tools/train/step_recorder.h"

#include <numeric>

#include "tools/cli/output.h"
#include "tools/results/rounds.h"

namespace tessera::tools {
namespace {

constexpr std::size_t kKeptSteps = 16;
constexpr std::int64_t kWarmUpSteps = 2;

}  // namespace

void StepRecorder::end_step(std::int64_t step, const std::vector<base::TraceEvent>& events) {
  steps_.push_back({step, begin_ns_, base::host_time_ns(), events, memory_tracker_.drain_history()});
  if (steps_.size() > kKeptSteps || (steps_.size() > 1 && steps_.front().number <= kWarmUpSteps)) steps_.pop_front();
}

StepTimeline StepRecorder::gather(comm::HostCollectives& control) const {
  const auto length = [](const RecordedStep& step) { return static_cast<double>(step.end_ns - step.begin_ns); };
  return gather_step(control, steps_.at(median_round(largest(control, each_of(steps_, length)))));
}

StepTimeline gather_step(comm::HostCollectives& control, const RecordedStep& own) {
  const std::vector<std::uint64_t> times = {static_cast<std::uint64_t>(own.begin_ns),
                                            static_cast<std::uint64_t>(own.end_ns)};
  std::int64_t first = own.begin_ns, last = own.begin_ns, length = 0;
  for (const auto& rank : control.gather_all(times)) {
    const auto begin = static_cast<std::int64_t>(rank[0]);
    first = std::min(first, begin);
    last = std::max(last, begin);
    length = std::max(length, static_cast<std::int64_t>(rank[1]) - begin);
  }
  StepTimeline mine{.step = own.number, .length_ns = length, .one_clock = last - first <= length};
  const std::int64_t origin = mine.one_clock ? first : own.begin_ns;
  RankTimeline& rank = mine.ranks.emplace_back();
  rank.rank = control.communicator().rank();
  rank.memory = samples_of(own.memory, origin, kMostSamples);
  for (base::TraceEvent event : own.events) {
    event.start_ns -= origin;
    event.end_ns -= origin;
    rank.events.push_back(std::move(event));
  }
  StepTimeline all = mine;
  all.ranks.clear();
  for (const nlohmann::json& json : gather_json(control, to_json(mine)))
    all.ranks.push_back(parse_timeline({json, "the step of a rank"}).ranks.at(0));
  return all;
}

void add_state(StepTimeline& timeline, const TrainPlan& plan, const fsdp::Strategy& strategy,
               const fsdp::MeshShape& mesh) {
  timeline.pieces = {parts_over(strategy.param_at_rest, mesh), parts_over(strategy.gradient, mesh),
                     parts_over(strategy.optimizer, mesh)};
  const TrainOptions& options = plan.options;
  if (options.optimizer != "adamw" || plan.lora || options.cpu_offload || !options.f32_modules.empty() ||
      !fsdp::periodic_axis(strategy).empty())
    return;  // the formula is of other state
  const bool half = plan.precision.compute != base::DType::f32;
  const auto elements = static_cast<double>(plan.parameters);
  timeline.predicted_state = static_cast<std::uint64_t>(elements * (half ? 2 : 4) / timeline.pieces[0] +
                                                        elements * (half ? 2 : 4) / timeline.pieces[1] +
                                                        elements * (half ? 12 : 8) / timeline.pieces[2]);
}

std::vector<nlohmann::json> gather_json(comm::HostCollectives& control, const nlohmann::ordered_json& own_json) {
  const std::string own = json_text(own_json);
  const std::vector<std::uint64_t> length = {own.size()};
  const std::vector<std::size_t> counts =
      each_of(control.gather_all(length), [](const auto& rank) { return std::size_t{rank[0]}; });
  std::string all(std::accumulate(counts.begin(), counts.end(), std::size_t{0}), ' ');
  const comm::ConstView in{own.data(), own.size(), base::DType::u8, {}};
  const comm::View out{all.data(), all.size(), base::DType::u8, {}};
  control.exchange(in, out, [&](comm::ConstView from, comm::View to, comm::OpOptions options) {
    return control.communicator().all_gather_v(from, to, counts, options);
  });
  std::vector<nlohmann::json> gathered;
  std::size_t position = 0;
  for (const std::size_t count : counts) {
    gathered.push_back(nlohmann::json::parse(all.substr(position, count)));
    position += count;
  }
  return gathered;
}

// Sent as text: unit names vary in length, and this runs only once.
std::vector<base::TraceEvent> gather_events(comm::HostCollectives& control, const std::vector<base::TraceEvent>& own) {
  nlohmann::ordered_json mine = nlohmann::ordered_json::array();
  for (const base::TraceEvent& e : own)
    mine.push_back({static_cast<int>(e.kind), e.unit, e.rank, e.bytes, e.start_ns, e.end_ns});
  std::vector<base::TraceEvent> events;
  for (const nlohmann::json& rank : gather_json(control, mine))
    for (const auto& e : rank)
      events.push_back({static_cast<base::TraceEventKind>(e[0].get<int>()), e[1], e[2], e[3], e[4], e[5]});
  return events;
}

}  // namespace tessera::tools
