// Counts what kernel calls move and compute.
#pragma once

#include "tessera/nn/kernel_interceptor.h"

namespace bench {

/// Adds up the bytes and operations of kernel calls, as an interceptor receives them.
class CallCounter final : public tessera::nn::KernelInterceptor {
 public:
  void call(const tessera::nn::KernelInvocation& call, tessera::base::Stream& /*stream*/,
            const std::function<void()>& run) override {
    bytes += call.reads + call.writes;
    if (call.product.count > 0) flops += call.size;
    run();
  }
  bool splits_sums() const override { return false; }
  double bytes = 0, flops = 0;
};

}  // namespace bench
