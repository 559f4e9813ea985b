#include "tools/bench/long_run.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;
using std::chrono::system_clock;

constexpr double kBatchUs = 1e5;            // calls of one point, before those of the next
constexpr std::size_t kMostStalls = 100;    // listed of an interval
constexpr std::size_t kMostKept = 1 << 20;  // of an interval, for its percentiles

/// "2026-11-27T18:40:00.123Z"
std::string utc_text(system_clock::time_point time) {
  const auto ms = std::chrono::floor<std::chrono::milliseconds>(time);
  const auto seconds = std::chrono::floor<std::chrono::seconds>(ms);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(system_clock::to_time_t(seconds)),
                     (ms - seconds).count());
}

std::string point_text(const ordered_json& point) {
  return fmt::format("{} of {} bytes", point.at("op").get<std::string>(), point.at("bytes").get<std::uint64_t>());
}

}  // namespace

void LongRun::add(const BenchOp& op, const BenchData& data) {
  const std::vector<std::uint64_t> sizes = plan_.sizes(op);
  const BenchShape largest = bench_shape(op, sizes.back(), data.dtype, data.ranks, control_.rank());
  buffers_.push_back(std::make_unique<BenchBuffers>(memory_, control_.rank(), data, largest, plan_.misaligned));
  buffers_.back()->fill(largest, false);
  for (const std::uint64_t bytes : sizes) {
    const BenchShape shape = bench_shape(op, bytes, data.dtype, data.ranks, control_.rank());
    Point point{.name = {{"op", op.name},
                         {"bytes", shape.bytes},
                         {"dtype", base::name_of(data.dtype)},
                         {"redop", op.reduces ? comm::name_of(data.redop) : "none"}},
                .call = buffers_.back()->call(shape, false),
                .messages = messages_of(op)};
    points_.push_back(std::move(point));
  }
}

void LongRun::measure_some(Point& point) {
  const double call_us = std::max(0.1, point.usual_us * point.messages);
  const int calls = point.usual_us > 0 ? static_cast<int>(std::clamp(kBatchUs / call_us, 1.0, 1000.0)) : 10;
  std::vector<double> samples;
  std::vector<system_clock::time_point> begun;
  for (int i = 0; i < calls; ++i) {
    begun.push_back(system_clock::now());
    samples.push_back(time_once(control_, {}, [&] { point.call.run(measured_); }) / point.messages);
  }
  reduce_to_slowest(control_, samples);
  if (point.usual_us <= 0) point.usual_us = median(samples);  // the same on all ranks
  if (control_.rank() != 0) return;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    if (point.samples.size() < kMostKept) point.samples.push_back(samples[i]);
    ++point.calls;
    point.max_us = std::max(point.max_us, samples[i]);
    if ((samples[i] - point.usual_us) * point.messages < plan_.long_run->stall_ms * 1e3) continue;
    if (++stall_count_ > kMostStalls) continue;
    ordered_json stall = {{"time", utc_text(begun[i])}};
    stall.update(point.name);
    stall.update({{"us", samples[i]}, {"median_us", point.usual_us}});
    stalls_.push_back(stall);
  }
}

void LongRun::run(const std::function<void(const ordered_json&)>& on_interval) {
  const std::int64_t begin = base::host_time_ns();
  for (std::int64_t last = begin;;) {
    for (Point& point : points_) measure_some(point);
    const std::int64_t now = base::host_time_ns();
    const auto seconds_since = [&](std::int64_t then) { return static_cast<double>(now - then) * 1e-9; };
    const bool over = plan_.long_run->seconds && seconds_since(begin) >= *plan_.long_run->seconds;
    std::uint8_t state = control_.rank() != 0                                ? 0
                         : over                                              ? 2
                         : seconds_since(last) >= plan_.long_run->interval_s ? 1
                                                                             : 0;
    control_.all_reduce(&state, 1, comm::ReduceOp::max(), "bench");
    if (state > 0 && control_.rank() == 0) on_interval(interval(seconds_since(last)));
    if (state > 0) last = now;
    if (state == 2) return;
  }
}

ordered_json LongRun::interval(double seconds) {
  ordered_json points = ordered_json::array();
  for (Point& point : points_) {
    ordered_json one = point.name;
    one.update({{"calls", std::exchange(point.calls, 0)},
                {"median_us", median(point.samples)},
                {"p90_us", percentile(point.samples, 0.9)},
                {"p99_us", percentile(point.samples, 0.99)},
                {"max_us", std::exchange(point.max_us, 0)}});
    points.push_back(one);
    point.samples.clear();
  }
  ordered_json json = {{"time", utc_text(system_clock::now())},
                       {"seconds", seconds},
                       {"points", points},
                       {"stall_count", stall_count_},
                       {"stalls", std::exchange(stalls_, ordered_json::array())}};
  stall_count_ = 0;
  return json;
}

std::string long_run_line(ordered_json& intervals) {
  ordered_json& last = intervals.back();
  std::uint64_t calls = 0;
  const ordered_json *longest = nullptr, *drifted = nullptr;
  for (std::size_t i = 0; i < last["points"].size(); ++i) {
    ordered_json& point = last["points"][i];
    const double before = intervals.front()["points"][i]["median_us"], now = point["median_us"];
    point["drift"] = before > 0 ? now / before - 1 : 0;
    calls += point["calls"].get<std::uint64_t>();
    if (longest == nullptr || point["max_us"] > (*longest)["max_us"]) longest = &point;
    if (drifted == nullptr || std::abs(point["drift"].get<double>()) > std::abs((*drifted)["drift"].get<double>()))
      drifted = &point;
  }
  return fmt::format("# {}: {} calls, the longest {:.3g} ms ({}), {} stalls; largest drift {:+.1f} % ({})\n",
                     last["time"].get<std::string>(), calls, (*longest)["max_us"].get<double>() * 1e-3,
                     point_text(*longest), last["stall_count"].get<std::uint64_t>(),
                     100 * (*drifted)["drift"].get<double>(), point_text(*drifted));
}

}  // namespace tessera::tools
