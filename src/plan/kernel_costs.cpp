#include "tessera/plan/kernel_costs.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/base/error.h"
#include "tessera/plan/cost_table.h"

namespace tessera::plan {

double KernelCostModel::seconds(const nn::KernelInvocation& call) const {
  const auto found = tables_.find(key(call));
  return found == tables_.end() ? 0 : found->second.at(call.size) * factor_;
}

KernelCostModel KernelCostModel::scaled(double factor) const {
  KernelCostModel result = *this;
  result.factor_ *= factor;
  return result;
}

void KernelCostModel::merge(const KernelCostModel& other) {
  if (factor_ != 1 || other.factor_ != 1) throw base::InvalidUsage("kernel cost model: scaled costs can't be merged");
  for (const auto& [key, table] : other.tables_) tables_[key].merge(table);
}

void KernelProfiler::call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) {
  const base::Event before = stream.record_timed();
  run();
  const base::Event after = stream.record_timed();
  const std::int64_t begun = before.time_ns();
  times_.add(call, static_cast<double>(after.time_ns() - begun) / 1e9);
}

double KernelCostModel::operator()(const nn::KernelInvocation& call) const {
  if (!has(call))
    throw base::InvalidUsage("simulation: kernel " + std::string(call.kernel) + " of " +
                             std::string(base::name_of(call.dtype)) +
                             " has no measured cost; profile a step that uses it");
  return seconds(call);
}

void KernelSimulator::call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) {
  const double seconds = time_(call);
  run();
  clock_.advance(stream, later(0, std::trunc(seconds * 1e9)), call.kernel);
  calls_[clock_.position(stream)] = call;
}

void CostTable::add(double size, double seconds) {
  if (!std::isfinite(size) || !std::isfinite(seconds) || size < 0 || seconds < 0)
    throw base::InvalidUsage("cost table: size " + std::to_string(size) + " and time " + std::to_string(seconds) +
                             " s must be finite and not negative");
  std::vector<double>& of_size = measured_[size];
  of_size.insert(std::ranges::upper_bound(of_size, seconds), seconds);
}

void CostTable::merge(const CostTable& other) {
  for (const auto& [size, seconds] : other.measured_)
    for (const double one : seconds) add(size, one);
}

/// The medians, made non-decreasing: neighbors in the wrong order get their mean (isotonic regression by pooling
/// adjacent violators, Barlow et al. 1972), so that one disturbed measurement doesn't raise all larger sizes.
std::vector<CostTable::Point> CostTable::points() const {
  struct Pool {
    double sum = 0;
    std::size_t sizes = 0;
    double mean() const { return sum / static_cast<double>(sizes); }
  };
  std::vector<Pool> pools;
  for (const auto& [size, seconds] : measured_) {
    pools.push_back({(seconds[(seconds.size() - 1) / 2] + seconds[seconds.size() / 2]) / 2, 1});
    while (pools.size() > 1 && pools.back().mean() < pools[pools.size() - 2].mean()) {
      const Pool last = pools.back();
      pools.pop_back();
      pools.back().sum += last.sum;
      pools.back().sizes += last.sizes;
    }
  }
  std::vector<Point> all;
  auto size = measured_.begin();
  for (const Pool& pool : pools)
    for (std::size_t i = 0; i < pool.sizes; ++i) all.push_back({(size++)->first, pool.mean()});
  return all;
}

double CostTable::at(double size) const {
  const std::vector<Point> all = points();
  if (all.empty()) return 0;
  const auto proportional = [size](const Point& point) {
    return point.size > 0 ? point.seconds * size / point.size : point.seconds;
  };
  if (size <= all.front().size) return proportional(all.front());
  if (size >= all.back().size) return proportional(all.back());
  const auto above = std::ranges::upper_bound(all, size, {}, &Point::size);
  const Point& to = *above;
  const Point& from = *(above - 1);
  return from.seconds + (to.seconds - from.seconds) * (size - from.size) / (to.size - from.size);
}

}  // namespace tessera::plan
