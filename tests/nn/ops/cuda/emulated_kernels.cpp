#include "tests/nn/ops/cuda/emulated_kernels.h"

#include "tests/nn/ops/cuda/emulation.h"
//
#include "tessera/nn/kernels/cuda/kernels.cuh"

namespace tessera::nn {
namespace {

std::size_t& launches() {
  thread_local std::size_t count = 0;
  return count;
}

}  // namespace

namespace cuda {

NativeStream native_stream(Stream& stream) {
  thread_local std::function<void(const std::function<void()>&)> launch;
  launch = [&stream](const std::function<void()>& kernel) {
    ++launches();
    stream.run(kernel);
  };
  return &launch;
}

std::unique_ptr<DeviceKernels> make_cuda_kernels(MemoryPool& memory, std::unique_ptr<MatmulTable> products,
                                                 std::unique_ptr<AttentionTable> attention) {
  return std::make_unique<CudaDeviceKernels>(memory, std::move(products), std::move(attention));
}

}  // namespace cuda

namespace test {
namespace {

using kernels::LinearBackward;
using kernels::LinearForward;
using kernels::OpMath;
using kernels::WeightLayout;

template <class T>
T weight_at(const T* weight, const kernels::LinearShape& s, std::size_t in, std::size_t out) {
  return s.layout == WeightLayout::out_in ? weight[out * s.in + in] : weight[in * s.out + out];
}

/// Plain loops for element types without products on the host; bias, GELU and bias gradients in the same pass, as in
/// cuBLASLt.
template <class T>
class LoopProducts final : public cuda::MatmulKernels<T> {
 public:
  cuda::Epilogue forward(Stream& stream, const LinearForward<T>& a) override {
    const bool gelu = a.activated && a.activation == kernels::Activation::gelu_tanh;
    stream.run([a, gelu] {
      const kernels::LinearShape& s = a.shape;
      for (std::size_t row = 0; row < s.rows; ++row)
        for (std::size_t out = 0; out < s.out; ++out) {
          auto sum = a.bias ? cuda::to_opmath(a.bias[out]) : OpMath<T>(0);
          for (std::size_t in = 0; in < s.in; ++in)
            sum += cuda::to_opmath(a.x[row * s.in + in]) * cuda::to_opmath(weight_at(a.weight, s, in, out));
          a.y[row * row_stride(a) + out] = cuda::from_opmath<T>(sum);
          if (gelu) a.activated[row * s.out + out] = cuda::from_opmath<T>(cuda::GeluTanh<T>::value(sum));
        }
    });
    return {.bias = true, .activation = gelu};
  }
  bool backward(Stream& stream, const LinearBackward<T>& a) override {
    stream.run([a] {
      if (a.dx) dx(a);
      if (a.dweight) dweight(a);
      if (has_dbias(a)) dbias(a);
    });
    return has_dbias(a);
  }

 private:
  static bool has_dbias(const LinearBackward<T>& a) { return a.dweight && a.dbias && !a.accumulate_dbias; }
  static void dbias(const LinearBackward<T>& a) {
    for (std::size_t out = 0; out < a.shape.out; ++out) {
      OpMath<T> sum = 0;
      for (std::size_t row = 0; row < a.shape.rows; ++row) sum += cuda::to_opmath(a.dy[row * a.shape.out + out]);
      a.dbias[out] = cuda::from_opmath<T>(sum);
    }
  }
  static void dx(const LinearBackward<T>& a) {
    const kernels::LinearShape& s = a.shape;
    for (std::size_t row = 0; row < s.rows; ++row)
      for (std::size_t in = 0; in < s.in; ++in) {
        OpMath<T> sum = 0;
        for (std::size_t out = 0; out < s.out; ++out)
          sum += cuda::to_opmath(a.dy[row * row_stride(a) + out]) * cuda::to_opmath(weight_at(a.weight, s, in, out));
        T& to = a.dx[row * s.in + in];
        to = cuda::added(a.accumulate_dx, to, sum);
      }
  }
  static void dweight(const LinearBackward<T>& a) {
    const kernels::LinearShape& s = a.shape;
    for (std::size_t in = 0; in < s.in; ++in)
      for (std::size_t out = 0; out < s.out; ++out) {
        OpMath<T> sum = 0;
        for (std::size_t row = 0; row < s.rows; ++row)
          sum += cuda::to_opmath(a.dy[row * row_stride(a) + out]) * cuda::to_opmath(a.x[row * s.in + in]);
        T& to = a.dweight[s.layout == WeightLayout::out_in ? out * s.in + in : in * s.out + out];
        to = cuda::added(a.accumulate_dweight, to, sum);
      }
  }
};

/// Matrix products of the host.
template <class T>
class HostProducts final : public cuda::MatmulKernels<T> {
 public:
  explicit HostProducts(ThreadPool& pool) : pool_(pool) {}
  cuda::Epilogue forward(Stream& stream, const LinearForward<T>& args) override {
    stream.run([this, args] {
      LinearForward<T> product = args;
      product.bias = nullptr;  // the device's own kernel adds it
      kernels::linear_forward<T>(pool_, product);
    });
    return {};
  }
  bool backward(Stream& stream, const LinearBackward<T>& args) override {
    stream.run([this, args] {
      LinearBackward<T> products = args;
      products.dbias = nullptr;
      kernels::linear_backward<T>(pool_, products);
    });
    return false;
  }

 private:
  ThreadPool& pool_;
};

class TestProducts final : public cuda::MatmulTable {
 public:
  explicit TestProducts(ThreadPool& pool) : pool_(pool), f32_(pool), f64_(pool) {}
  cuda::MatmulKernels<float>& f32_kernels() override { return f32_; }
  cuda::MatmulKernels<double>& f64_kernels() override { return f64_; }
  cuda::MatmulKernels<f16>& f16_kernels() override { return f16_; }
  cuda::MatmulKernels<bf16>& bf16_kernels() override { return bf16_; }
  std::string name() const override { return "the host"; }
  std::string fp8_reason() const override { return ""; }
  cuda::Epilogue fp8_product(Stream& stream, const kernels::Fp8ProductArgs& args) override {
    stream.run([this, args] {
      kernels::Fp8ProductArgs product = args;
      product.bias = nullptr;  // the device's own kernel adds it
      kernels::fp8_product(pool_, product);
    });
    return {};
  }

 private:
  ThreadPool& pool_;
  HostProducts<float> f32_;
  HostProducts<double> f64_;
  LoopProducts<f16> f16_;
  LoopProducts<bf16> bf16_;
};

}  // namespace

std::unique_ptr<DeviceKernels> make_emulated_kernels(const KernelResources& resources) {
  return cuda::make_cuda_kernels(resources.memory, std::make_unique<TestProducts>(resources.threads));
}

static_assert(kThreadOrders == emulation::kOrders);
std::size_t kernel_launches() { return launches(); }
void set_thread_order(int order) { emulation::block().order = static_cast<emulation::Order>(order); }

}  // namespace test
}  // namespace tessera::nn
