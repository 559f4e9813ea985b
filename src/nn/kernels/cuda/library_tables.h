// Attention and matrix products by vendor libraries, separate from this library's kernels, which compute what they
// can't.
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

/// The operations of a linear layer's forward that its product included. The caller computes the rest.
struct Epilogue {
  bool bias = false;
  bool activation = false;
};

template <class T>
class MatmulKernels {
 public:
  virtual ~MatmulKernels() = default;
  virtual Epilogue forward(Stream& stream, const kernels::LinearForward<T>& args) = 0;
  /// Computes dx and dweight. True if a product included dbias; else the caller computes it.
  virtual bool backward(Stream& stream, const kernels::LinearBackward<T>& args) = 0;
};

class MatmulTable {
 public:
  virtual ~MatmulTable() = default;
  virtual MatmulKernels<float>& f32_kernels() = 0;
  virtual MatmulKernels<double>& f64_kernels() = 0;
  virtual MatmulKernels<f16>& f16_kernels() = 0;
  virtual MatmulKernels<bf16>& bf16_kernels() = 0;
  virtual std::string name() const = 0;  ///< of what computes the products, down to the bits
  /// See DeviceKernels::fp8_reason().
  virtual std::string fp8_reason() const = 0;
  /// Computes the product, perhaps without its bias.
  virtual Epilogue fp8_product(Stream& stream, const kernels::Fp8ProductArgs& args) = 0;
};

struct CublasLt;

/// `api` must outlive the table. `choices`: the value of kMatmulVariable.
std::unique_ptr<MatmulTable> make_products(const KernelResources& resources, const CublasLt& api,
                                           std::string_view choices = {});

/// All kernels of the device. Without `attention`, this library's kernels compute all of it.
std::unique_ptr<DeviceKernels> make_cuda_kernels(MemoryPool& memory, std::unique_ptr<MatmulTable> products,
                                                 std::unique_ptr<AttentionTable> attention = nullptr);

}  // namespace tessera::nn::cuda
