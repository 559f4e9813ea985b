// Who looks at every call of a device's kernels: to measure them, or to say how long they would take.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "tessera/base/device_runtime.h"
#include "tessera/base/time_table.h"
#include "tessera/base/virtual_clock.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

/// What a kernel was asked to do. Its size is what its time depends on: floating-point operations of products and
/// attention, bytes read and written of all others.
struct KernelCall {
  std::string_view kernel;  ///< as in Kernels: "linear_forward"; "copy" and "clear" of the runtime; never freed
  DType dtype = DType::f32;
  double size = 0;
};

class TESSERA_API KernelObserver {
 public:
  virtual ~KernelObserver();
  /// Instead of the kernel: `run` appends it to `stream`.
  virtual void call(const KernelCall& call, Stream& stream, const std::function<void()>& run) = 0;
};

/// How long each kernel takes by its size. A value.
class TESSERA_API KernelTimes {
 public:
  void add(const KernelCall& call, double seconds) { tables_[key(call)].add(call.size, seconds); }
  /// 0 for kernels that were not measured; see has().
  double seconds(const KernelCall& call) const;
  bool has(const KernelCall& call) const { return tables_.contains(key(call)); }
  /// All times `factor` times as long: another machine, or a test.
  KernelTimes scaled(double factor) const;
  /// Adds what another one has measured; both as they are, not scaled.
  void merge(const KernelTimes& other);

 private:
  using Key = std::pair<std::string_view, DType>;
  static Key key(const KernelCall& call) { return {call.kernel, call.dtype}; }
  std::map<Key, base::TimeTable> tables_;
  double factor_ = 1;
};

/// Measures: waits before and after each call.
class TESSERA_API KernelMeasurement final : public KernelObserver {
 public:
  void call(const KernelCall& call, Stream& stream, const std::function<void()>& run) override;
  const KernelTimes& times() const { return times_; }

 private:
  KernelTimes times_;
};

/// Lets a virtual clock pass instead. Throws InvalidUsage, naming it, for a kernel whose times are not known.
class TESSERA_API SimulatedKernels final : public KernelObserver {
 public:
  /// `clock` made the streams; both outlive this.
  SimulatedKernels(base::VirtualClock& clock, const KernelTimes& times) : clock_(clock), times_(times) {}
  void call(const KernelCall& call, Stream& stream, const std::function<void()>& run) override;

 private:
  base::VirtualClock& clock_;
  const KernelTimes& times_;
};

/// `inner`, with every kernel that is called on it, every copy and every fill shown to `observer`, which outlives it.
TESSERA_API std::shared_ptr<base::DeviceRuntime> observe(std::shared_ptr<base::DeviceRuntime> inner,
                                                         KernelObserver& observer);

}  // namespace tessera::nn
