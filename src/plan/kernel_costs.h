// What kernels cost, by kernel and size, and interceptors that measure it or let it pass on a virtual clock.
#pragma once

#include <functional>
#include <map>
#include <string_view>
#include <utility>

#include "tessera/base/export.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tessera/plan/cost_table.h"
#include "tessera/plan/virtual_clock.h"

namespace tessera::plan {

/// Seconds that a call takes on the simulated machine. Throws InvalidUsage for a kernel whose cost it does not know.
using KernelTime = std::function<double(const nn::KernelInvocation&)>;

/// Duration of each kernel as a function of its size. A value type.
class TESSERA_API KernelCostModel {
 public:
  /// Adds one measured call.
  void add(const nn::KernelInvocation& call, double seconds) { tables_[key(call)].add(call.size, seconds); }
  /// 0 for kernels that were not measured; see has().
  double seconds(const nn::KernelInvocation& call) const;
  /// True if this kernel was measured for this dtype, at any size.
  bool has(const nn::KernelInvocation& call) const { return tables_.contains(key(call)); }
  /// The same as seconds(), but throws InvalidUsage that names a kernel that was not measured.
  double operator()(const nn::KernelInvocation& call) const;
  /// A copy in which all times are `factor` times as long: for another machine, or a test.
  KernelCostModel scaled(double factor) const;
  /// Adds the measurements of `other`; both unscaled.
  void merge(const KernelCostModel& other);

 private:
  using Key = std::pair<std::string_view, base::DType>;
  static Key key(const nn::KernelInvocation& call) { return {call.kernel, call.dtype}; }
  std::map<Key, CostTable> tables_;
  double factor_ = 1;
};

/// Measures each call: waits for the stream before and after it.
class TESSERA_API KernelProfiler final : public nn::KernelInterceptor {
 public:
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;
  const KernelCostModel& times() const { return times_; }  ///< times of all calls so far

 private:
  KernelCostModel times_;
};

/// Advances a virtual clock instead of running kernels, and keeps the calls by task.
class TESSERA_API KernelSimulator final : public nn::KernelInterceptor {
 public:
  /// `clock` created the streams and must outlive this object.
  KernelSimulator(VirtualClock& clock, KernelTime time) : clock_(clock), time_(std::move(time)) {}
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;
  const std::map<TaskId, nn::KernelInvocation>& calls() const { return calls_; }  ///< so far, in the clock's graph

 private:
  VirtualClock& clock_;
  const KernelTime time_;
  std::map<TaskId, nn::KernelInvocation> calls_;
};

}  // namespace tessera::plan
