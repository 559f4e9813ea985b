// Matrix products of the linear layer, separate from the other kernels because a vendor library computes them.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "tessera/nn/kernels/cuda/attention_table.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

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
