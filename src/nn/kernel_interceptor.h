// Interceptors of a device's kernel calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "tessera/base/device_runtime.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

/// `count` equal matrix products of (m x k) by (k x n). Attention: scores of `count` heads, m and n positions, k the
/// head's width; only pairs with n up to m are computed.
struct ProductShape {
  std::int64_t m = 0;      ///< rows of the result
  std::int64_t n = 0;      ///< columns of the result
  std::int64_t k = 0;      ///< terms of each sum
  std::int64_t count = 0;  ///< number of products or heads
};

/// One kernel call. `reads` and `writes` are the bytes that it moves. `size` is the key of its cost: measured times are
/// kept and looked up by it.
struct KernelInvocation {
  /// The name as in KernelTable: "linear_forward"; with an activation "linear_activation_forward". Attention whose
  /// weights are dropped out is "attention_dropout_forward" and "attention_dropout_backward". "copy", "copy_from_host",
  /// "copy_to_host" and "clear" of the runtime. Never freed.
  std::string_view kernel;
  DType dtype = DType::f32;  ///< dtype of the elements; u8 for untyped copies
  /// Floating-point operations of products and attention. Of all others the bytes of a call that writes every result
  /// and adds to none, so that a recorded cost stays valid whatever a call adds to.
  double size = 0;
  double reads = 0;      ///< bytes of the operands, each once, but for vectors as short as a row and single numbers
  double writes = 0;     ///< bytes of the results, likewise
  ProductShape product;  ///< shape of products and attention; count 0 for all others
};

/// Receives the kernel calls of a runtime that observe() wraps, on their thread.
class TESSERA_API KernelInterceptor {
 public:
  virtual ~KernelInterceptor();
  /// Called instead of the kernel; `run` appends the kernel to `stream`.
  virtual void call(const KernelInvocation& call, Stream& stream, const std::function<void()>& run) = 0;
  /// True: a norm that first adds comes as two calls, which every device has and whose costs are known. Else it is one
  /// "add_layer_norm_forward" or "add_rms_norm_forward".
  virtual bool splits_sums() const { return true; }
};

/// Returns a runtime around `inner` that passes each kernel call, copy and fill to `observer`, which must outlive it.
/// Its streams come from `make_stream` if that is not empty.
TESSERA_API std::shared_ptr<base::DeviceRuntime> observe(std::shared_ptr<base::DeviceRuntime> inner,
                                                         KernelInterceptor& observer,
                                                         std::function<std::unique_ptr<Stream>()> make_stream = {});

}  // namespace tessera::nn
