// Who looks at every call of a device's kernels: to measure them, or to say how long they would take.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "tessera/base/cost_table.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/virtual_clock.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

/// What a kernel was asked to do. Its size is what its time depends on: floating-point operations of products and
/// attention, bytes read and written of all others.
struct KernelInvocation {
  std::string_view kernel;  ///< as in Kernels: "linear_forward"; "copy" and "clear" of the runtime; never freed
  DType dtype = DType::f32;
  double size = 0;
};

class TESSERA_API KernelInterceptor {
 public:
  virtual ~KernelInterceptor();
  /// Instead of the kernel: `run` appends it to `stream`.
  virtual void call(const KernelInvocation& call, Stream& stream, const std::function<void()>& run) = 0;
};

/// How long each kernel takes by its size. A value.
class TESSERA_API KernelCostModel {
 public:
  void add(const KernelInvocation& call, double seconds) { tables_[key(call)].add(call.size, seconds); }
  /// 0 for kernels that were not measured; see has().
  double seconds(const KernelInvocation& call) const;
  bool has(const KernelInvocation& call) const { return tables_.contains(key(call)); }
  /// All times `factor` times as long: another machine, or a test.
  KernelCostModel scaled(double factor) const;
  /// Adds what another one has measured; both as they are, not scaled.
  void merge(const KernelCostModel& other);

 private:
  using Key = std::pair<std::string_view, DType>;
  static Key key(const KernelInvocation& call) { return {call.kernel, call.dtype}; }
  std::map<Key, base::CostTable> tables_;
  double factor_ = 1;
};

/// Measures: waits before and after each call.
class TESSERA_API KernelProfiler final : public KernelInterceptor {
 public:
  void call(const KernelInvocation& call, Stream& stream, const std::function<void()>& run) override;
  const KernelCostModel& times() const { return times_; }

 private:
  KernelCostModel times_;
};

/// Lets a virtual clock pass instead. Throws InvalidUsage, naming it, for a kernel whose times are not known.
class TESSERA_API KernelSimulator final : public KernelInterceptor {
 public:
  /// `clock` made the streams; both outlive this.
  KernelSimulator(base::VirtualClock& clock, const KernelCostModel& times) : clock_(clock), times_(times) {}
  void call(const KernelInvocation& call, Stream& stream, const std::function<void()>& run) override;

 private:
  base::VirtualClock& clock_;
  const KernelCostModel& times_;
};

/// `inner`, with every kernel that is called on it, every copy and every fill shown to `observer`, which outlives it.
TESSERA_API std::shared_ptr<base::DeviceRuntime> observe(std::shared_ptr<base::DeviceRuntime> inner,
                                                         KernelInterceptor& observer);

}  // namespace tessera::nn
