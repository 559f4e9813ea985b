#include "tessera/nn/ops/cuda/products.cuh"

#include "tessera/nn/ops/cuda/internal/matmul.h"

namespace tessera::nn::cuda {
namespace {

template <class T>
class LtProducts final : public Products<T> {
 public:
  explicit LtProducts(Matmul& matmul) : matmul_(matmul) {}

  Epilogue forward(Stream& stream, const kernels::LinearForward<T>& args) override {
    const kernels::LinearShape& s = args.shape;
    Product product{.dtype = dtype_of<T>,
                    .trans_b = s.layout == kernels::WeightLayout::out_in,
                    .m = s.rows,
                    .n = s.out,
                    .k = s.in,
                    .a = args.x,
                    .b = args.weight,
                    .bias = Matmul::adds_bias(dtype_of<T>) ? args.bias : nullptr,
                    .c = args.y};
    if (args.activated && args.activation == kernels::Activation::gelu_tanh) {
      Product with_gelu = product;
      with_gelu.before_gelu = args.y;
      with_gelu.c = args.activated;
      if (matmul_.can(with_gelu)) {
        matmul_.run(stream, with_gelu);
        return {.bias = true, .activation = true};
      }
    }
    matmul_.run(stream, product);
    return {.bias = product.bias != nullptr};
  }

  void backward(Stream& stream, const kernels::LinearBackward<T>& args) override {
    const kernels::LinearShape& s = args.shape;
    const bool out_in = s.layout == kernels::WeightLayout::out_in;
    if (args.dweight)  // dW[in, out] = x^T dy, dW[out, in] = dy^T x
      matmul_.run(stream, {.dtype = dtype_of<T>,
                           .trans_a = true,
                           .m = out_in ? s.out : s.in,
                           .n = out_in ? s.in : s.out,
                           .k = s.rows,
                           .a = out_in ? args.dy : args.x,
                           .b = out_in ? args.x : args.dy,
                           .accumulate = args.accumulate_dweight,
                           .c = args.dweight});
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
  }

 private:
  Matmul& matmul_;
};

class AllLtProducts final : public AllProducts {
 public:
  explicit AllLtProducts(const KernelResources& resources)
      : matmul_(resources), f32_(matmul_), f64_(matmul_), half_(matmul_), brain_(matmul_) {}
  Products<float>& f32() override { return f32_; }
  Products<double>& f64() override { return f64_; }
  Products<f16>& half() override { return half_; }
  Products<bf16>& brain() override { return brain_; }

 private:
  Matmul matmul_;
  LtProducts<float> f32_;
  LtProducts<double> f64_;
  LtProducts<f16> half_;
  LtProducts<bf16> brain_;
};

}  // namespace

std::unique_ptr<AllProducts> make_products(const KernelResources& resources) {
  return std::make_unique<AllLtProducts>(resources);
}

}  // namespace tessera::nn::cuda
