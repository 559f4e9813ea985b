#include "tessera/plan/kernel_costs.h"

#include <cmath>
#include <string>

#include "tessera/base/error.h"

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

}  // namespace tessera::plan
