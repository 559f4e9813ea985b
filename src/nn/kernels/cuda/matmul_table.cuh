// Matrix products of the linear layer, apart from the other kernels: they come from a vendor's library.
#pragma once

#include <memory>

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

/// What of a linear layer's forward its product did in the same pass. The rest is the caller's.
struct Epilogue {
  bool bias = false;
  bool activation = false;
};

template <class T>
class MatmulKernels {
 public:
  virtual ~MatmulKernels() = default;
  virtual Epilogue forward(Stream& stream, const kernels::LinearForward<T>& args) = 0;
  /// dx and dweight; dbias is not a product.
  virtual void backward(Stream& stream, const kernels::LinearBackward<T>& args) = 0;
};

class MatmulTable {
 public:
  virtual ~MatmulTable() = default;
  virtual MatmulKernels<float>& f32() = 0;
  virtual MatmulKernels<double>& f64() = 0;
  virtual MatmulKernels<f16>& half() = 0;
  virtual MatmulKernels<bf16>& brain() = 0;
};

/// Through cuBLASLt, which is loaded at the first call. Throws Unsupported where it is missing.
std::unique_ptr<MatmulTable> make_products(const KernelResources& resources);

/// The whole table.
std::unique_ptr<DeviceKernels> make_cuda_kernels(MemoryPool& memory, std::unique_ptr<MatmulTable> products);

}  // namespace tessera::nn::cuda
