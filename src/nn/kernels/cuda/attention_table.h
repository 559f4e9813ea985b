// Attention by a vendor library, separate from this library's kernels, which compute what it can't.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "tessera/nn/attention_library.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

inline constexpr std::string_view kOwnAttention = "this library";

template <class T>
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  /// Whether calls with this shape are for the library, but for those with dropout or sums into gradients.
  virtual bool supports(const kernels::AttentionShape& shape) const = 0;
  /// False if the library can't compute this call. Depends only on the call's shape and options, never on values: all
  /// ranks compute the same bits.
  virtual bool forward(Stream& stream, const kernels::AttentionForward<T>& args) = 0;
  /// As forward().
  virtual bool backward(Stream& stream, const kernels::AttentionBackward<T>& args) = 0;
};

class AttentionTable {
 public:
  virtual ~AttentionTable() = default;
  virtual AttentionKernels<f16>& f16_kernels() = 0;
  virtual AttentionKernels<bf16>& bf16_kernels() = 0;
  /// What computes attention: kOwnAttention until the library does, then for example "cuDNN 9.26.0 (engine 2)".
  virtual std::string name() const = 0;
};

/// Attention as `library` demands. Null: this library's kernels compute all of it. Throws Unsupported if cuDNN is
/// demanded of a build without it.
std::unique_ptr<AttentionTable> make_attention(const KernelResources& resources, AttentionLibrary library);

/// One line for `tessera info`: what would compute attention in this process, and why.
std::string describe_attention() noexcept;

}  // namespace tessera::nn::cuda
