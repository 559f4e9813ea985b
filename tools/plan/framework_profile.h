// The kernels that another framework would run for the engine's calls, as parts whose speed is not known yet.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <vector>

#include "tessera/base/virtual_clock.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tools/plan/workload.h"

namespace tessera::tools {

/// Work of a rank between two points of its program.
struct KernelWork {
  double products = 0;  ///< seconds at full efficiency
  double memory = 0;    ///< seconds of memory-bound kernels and of attention
  double gaps = 0;      ///< seconds between kernels
  double launches = 0;  ///< kernel launches of the host
  double host = 0;      ///< further seconds of the host

  KernelWork& operator+=(const KernelWork& other);
  bool empty() const { return products + memory + gaps + launches + host == 0; }
};

/// A block's kernels that the engine doesn't call the same way are added where it calls its attention: once for each
/// block and pass. Products and attention cost what their shapes say; all other calls cost nothing.
class FrameworkProfile final : public nn::KernelInterceptor {
 public:
  /// Both outlive this object.
  FrameworkProfile(const Workload& workload, base::VirtualClock& clock) : workload_(workload), clock_(clock) {}
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;

  const std::map<base::TaskId, KernelWork>& work() const { return work_; }         ///< of the clock's tasks
  const std::vector<base::TaskId>& microbatches() const { return microbatches_; }  ///< the first task of each

 private:
  enum class Pass : std::uint8_t { forward, backward, update };
  KernelWork cost(const nn::KernelInvocation& call);
  KernelWork product(const ProductSize& size, double launches) const;
  KernelWork traffic(double bytes, double launches) const;
  KernelWork linear_forward(const ProductSize& size);
  KernelWork linear_backward(const ProductSize& size, bool both) const;
  KernelWork attention(const ProductSize& size, bool backward) const;
  KernelWork block_forward(const ProductSize& attention) const;
  KernelWork block_recomputed(const ProductSize& attention) const;
  KernelWork block_backward(const ProductSize& attention);
  KernelWork embedding(bool backward);
  KernelWork update(double elements);
  void add(const KernelWork& work, base::Stream& stream, std::string_view label);

  const Workload& workload_;
  base::VirtualClock& clock_;
  Pass pass_ = Pass::update;
  bool begins_ = false;                  // the next work is the first of a microbatch
  bool embedding_done_ = false;          // the backward of this microbatch's embedding was counted
  std::size_t recomputed_products_ = 0;  // of the block that is recomputed
  std::size_t blocks_back_ = 0;          // blocks whose backward was computed
  std::map<base::TaskId, KernelWork> work_;
  std::vector<base::TaskId> microbatches_;
};

}  // namespace tessera::tools
