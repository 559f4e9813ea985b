#include "tessera/nn/kernels/cuda/matmul_table.cuh"

#include "tessera/base/cuda/layers.h"
#include "tessera/nn/kernels/cuda/matmul.h"

namespace tessera::nn::cuda {
namespace {

template <class T>
class CublasLtKernels final : public MatmulKernels<T> {
 public:
  explicit CublasLtKernels(CublasLtMatmul& matmul) : matmul_(matmul) {}

  Epilogue forward(Stream& stream, const kernels::LinearForward<T>& args) override {
    const kernels::LinearShape& s = args.shape;
    MatmulArgs product{.dtype = dtype_of<T>,
                       .trans_b = s.layout == kernels::WeightLayout::out_in,
                       .m = s.rows,
                       .n = s.out,
                       .k = s.in,
                       .a = args.x,
                       .b = args.weight,
                       .bias = args.bias,
                       .c = args.y};
    if (args.activated && args.activation == kernels::Activation::gelu_tanh) {
      MatmulArgs with_gelu = product;
      with_gelu.before_gelu = args.y;
      with_gelu.c = args.activated;
      if (matmul_.can(with_gelu)) {
        matmul_.run(stream, with_gelu);
        return {.bias = true, .activation = true};
      }
    }
    if (!matmul_.can(product)) product.bias = nullptr;
    matmul_.run(stream, product);
    return {.bias = product.bias != nullptr};
  }

  bool backward(Stream& stream, const kernels::LinearBackward<T>& args) override {
    const kernels::LinearShape& s = args.shape;
    const bool out_in = s.layout == kernels::WeightLayout::out_in;
    bool has_dbias = false;
    if (args.dweight) {  // dW[in, out] = x^T dy, dW[out, in] = dy^T x
      MatmulArgs product{.dtype = dtype_of<T>,
                         .trans_a = true,
                         .m = out_in ? s.out : s.in,
                         .n = out_in ? s.in : s.out,
                         .k = s.rows,
                         .a = out_in ? args.dy : args.x,
                         .b = out_in ? args.x : args.dy,
                         .accumulate = args.accumulate_dweight,
                         .c = args.dweight};
      // The library overwrites the sums of dy, so they can't be added to a gradient. Whether they are depends only on
      // the call, never on values: all ranks compute the same bits.
      if (args.dbias && !args.accumulate_dbias) {
        (out_in ? product.a_sums : product.b_sums) = args.dbias;
        has_dbias = matmul_.can(product);
        if (!has_dbias) product.a_sums = product.b_sums = nullptr;
      }
      matmul_.run(stream, product);
    }
    if (args.dx)
      matmul_.run(stream, {.dtype = dtype_of<T>,
                           .trans_b = !out_in,
                           .m = s.rows,
                           .n = s.in,
                           .k = s.out,
                           .a = args.dy,
                           .b = args.weight,
                           .accumulate = args.accumulate_dx,
                           .c = args.dx});
    return has_dbias;
  }

 private:
  CublasLtMatmul& matmul_;
};

class CublasLtTable final : public MatmulTable {
 public:
  CublasLtTable(const KernelResources& resources, const CublasLt& api)
      : matmul_(resources, api), f32_(matmul_), f64_(matmul_), f16_(matmul_), bf16_(matmul_) {}
  MatmulKernels<float>& f32_kernels() override { return f32_; }
  MatmulKernels<double>& f64_kernels() override { return f64_; }
  MatmulKernels<f16>& f16_kernels() override { return f16_; }
  MatmulKernels<bf16>& bf16_kernels() override { return bf16_; }

 private:
  CublasLtMatmul matmul_;
  CublasLtKernels<float> f32_;
  CublasLtKernels<double> f64_;
  CublasLtKernels<f16> f16_;
  CublasLtKernels<bf16> bf16_;
};

}  // namespace

std::unique_ptr<MatmulTable> make_products(const KernelResources& resources, const CublasLt& api) {
  return std::make_unique<CublasLtTable>(resources, api);
}

}  // namespace tessera::nn::cuda

namespace tessera::base::cuda {

// The CUDA device finds the kernels of nn here.
const void* find_of_nn(std::string_view interface) noexcept {
  static const nn::KernelFactory kKernels{[](const nn::KernelResources& resources) {
    return nn::cuda::make_cuda_kernels(resources.memory, nn::cuda::make_products(resources, nn::cuda::cublas_lt()));
  }};
  return interface == nn::KernelFactory::kInterface ? &kKernels : nullptr;
}

}  // namespace tessera::base::cuda
