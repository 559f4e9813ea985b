#include "tessera/base/cuda/runtime.h"
#include "tessera/base/error.h"
#include "tessera/nn/kernels/cuda/library_tables.h"
#include "tessera/nn/kernels/cuda/matmul.h"
#include "tessera/nn/kernels/vendor_library.h"
#include "tessera/nn/variables.h"

namespace tessera::nn::cuda {
namespace {

/// The output columns that cuBLASLt can compute with its fastest half-precision kernels, which load and store 16 bytes
/// at once: besides the rows' starts, the extents must be multiples of 16 bytes. A packed layer, whose rows start
/// anywhere unless all its columns fit, and a weight [in, out] are not split.
template <class T>
std::size_t whole_vectors(const kernels::LinearShape& s, std::size_t stride) {
  constexpr std::size_t kVector = 16 / sizeof(T);
  const bool split = sizeof(T) == 2 && s.layout == kernels::WeightLayout::out_in && stride % kVector == 0;
  return split && s.out > kVector ? s.out / kVector * kVector : s.out;
}

/// Output columns of a layer whose weight is [out, in] are a layer of their own.
template <class T>
kernels::LinearForward<T> columns_of(kernels::LinearForward<T> args, std::size_t begin, std::size_t count) {
  args.y_stride = row_stride(args);
  args.weight += begin * args.shape.in;
  args.y += begin;
  args.shape.out = count;
  return args;
}
template <class T>
kernels::LinearBackward<T> columns_of(kernels::LinearBackward<T> args, std::size_t begin, std::size_t count) {
  args.dy_stride = row_stride(args);
  if (args.weight) args.weight += begin * args.shape.in;
  if (args.dweight) args.dweight += begin * args.shape.in;
  args.dy += begin;
  args.shape.out = count;
  return args;
}

template <class T>
class CublasLtKernels final : public MatmulKernels<T> {
 public:
  explicit CublasLtKernels(CublasLtMatmul& matmul) : matmul_(matmul) {}

  Epilogue forward(Stream& stream, const kernels::LinearForward<T>& args) override {
    const std::size_t whole = whole_vectors<T>(args.shape, row_stride(args));
    if (whole == args.shape.out) return run_forward(stream, args);
    run_forward(stream, columns_of(args, 0, whole));
    run_forward(stream, columns_of(args, whole, args.shape.out - whole));
    return {};  // rows that are not packed have no bias
  }

  bool backward(Stream& stream, const kernels::LinearBackward<T>& args) override {
    const std::size_t whole = whole_vectors<T>(args.shape, row_stride(args));
    if (whole == args.shape.out) return run_backward(stream, args);
    kernels::LinearBackward<T> rest = columns_of(args, whole, args.shape.out - whole),
                               most = columns_of(args, 0, whole);
    rest.dbias = most.dbias = nullptr;
    // The few columns first: dx is rounded after each product, and their part of it is small.
    run_backward(stream, rest);
    most.accumulate_dx = true;
    run_backward(stream, most);
    return false;
  }

 private:
  Epilogue run_forward(Stream& stream, const kernels::LinearForward<T>& args) {
    const kernels::LinearShape& s = args.shape;
    MatmulArgs product{.dtype = dtype_of<T>,
                       .m = s.rows,
                       .n = s.out,
                       .k = s.in,
                       .a = {args.x},
                       .b = {args.weight, 0, s.layout == kernels::WeightLayout::out_in},
                       .bias = args.bias,
                       .c = args.y,
                       .c_stride = row_stride(args)};
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

  /// True if dbias is computed, too.
  bool run_backward(Stream& stream, const kernels::LinearBackward<T>& args) {
    const kernels::LinearShape& s = args.shape;
    const std::size_t dy_stride = row_stride(args);
    const bool out_in = s.layout == kernels::WeightLayout::out_in;
    bool has_dbias = false;
    if (args.dweight) {  // dW[in, out] = x^T dy, dW[out, in] = dy^T x
      MatmulArgs product{.dtype = dtype_of<T>,
                         .m = out_in ? s.out : s.in,
                         .n = out_in ? s.in : s.out,
                         .k = s.rows,
                         .a = {out_in ? args.dy : args.x, out_in ? dy_stride : 0, true},
                         .b = {out_in ? args.x : args.dy, out_in ? 0 : dy_stride},
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
                           .m = s.rows,
                           .n = s.in,
                           .k = s.out,
                           .a = {args.dy, dy_stride},
                           .b = {args.weight, 0, !out_in},
                           .accumulate = args.accumulate_dx,
                           .c = args.dx});
    return has_dbias;
  }

  CublasLtMatmul& matmul_;
};

class CublasLtTable final : public MatmulTable {
 public:
  CublasLtTable(const KernelResources& resources, const CublasLt& api, std::string_view choices)
      : runtime_(resources.runtime),
        matmul_(resources, api, choices),
        f32_(matmul_),
        f64_(matmul_),
        f16_(matmul_),
        bf16_(matmul_) {}
  MatmulKernels<float>& f32_kernels() override { return f32_; }
  MatmulKernels<double>& f64_kernels() override { return f64_; }
  MatmulKernels<f16>& f16_kernels() override { return f16_; }
  MatmulKernels<bf16>& bf16_kernels() override { return bf16_; }
  std::string name() const override { return matmul_.name(); }

  std::string fp8_reason() const override {
    const base::DeviceProperties gpu = runtime_.properties();
    if (gpu.generation >= kFp8Generation) return "";
    return "fp8: " + gpu.name + " has compute capability " + std::to_string(gpu.generation / 10) + "." +
           std::to_string(gpu.generation % 10) + ", and products in 8 bits need 8.9 or newer (Ada, Hopper); use bf16";
  }
  Epilogue fp8_product(Stream& stream, const kernels::Fp8ProductArgs& args) override {
    const Fp8Types types{.a = args.a.format,
                         .b = args.b.format,
                         .a_descale = args.a.descale,
                         .b_descale = args.b.descale,
                         .fast = args.fast};
    MatmulArgs product{.dtype = args.dtype,
                       .fp8 = &types,
                       .m = args.m,
                       .n = args.n,
                       .k = args.k,
                       .a = {args.a.codes},
                       .b = {args.b.codes, 0, true},
                       .bias = args.bias,
                       .accumulate = args.accumulate,
                       .c = args.c};
    if (!matmul_.can(product)) product.bias = nullptr;
    matmul_.run(stream, product);
    return {.bias = product.bias != nullptr};
  }

 private:
  DeviceRuntime& runtime_;
  CublasLtMatmul matmul_;
  CublasLtKernels<float> f32_;
  CublasLtKernels<double> f64_;
  CublasLtKernels<f16> f16_;
  CublasLtKernels<bf16> bf16_;
};

}  // namespace

std::unique_ptr<MatmulTable> make_products(const KernelResources& resources, const CublasLt& api,
                                           std::string_view choices) {
  return std::make_unique<CublasLtTable>(resources, api, choices);
}

const CublasLt& cublas_lt() {
  static const CublasLt loaded = [] {  // once per process, as by dlopen() itself; a failure is tried again
    CublasLt api;
    kernels::VendorLibrary library("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), "cuBLASLt");
#define TESSERA_FIND(function) library.find(#function, api.function);
    TESSERA_CUBLAS_LT_FUNCTIONS(TESSERA_FIND)
#undef TESSERA_FIND
    if (!library.problem().empty()) throw base::Unsupported("cuda: no matrix products: " + library.problem());
    return api;
  }();
  return loaded;
}

void check(const CublasLt& api, cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw base::BackendError(std::string("cuda: ") + what + ": " + api.cublasLtGetStatusString(status));
}

}  // namespace tessera::nn::cuda

namespace tessera::base::cuda {

// The CUDA device finds the kernels of nn here.
const void* find_of_nn(std::string_view interface) noexcept {
  static const nn::KernelFactory kKernels{[](const nn::KernelResources& resources) {
    return nn::cuda::make_cuda_kernels(
        resources.memory,
        nn::cuda::make_products(resources, nn::cuda::cublas_lt(), base::env_or_default(nn::kMatmulVariable)),
        nn::cuda::make_attention(resources, nn::attention_library_of_environment()));
  }};
  return interface == nn::KernelFactory::kInterface ? &kKernels : nullptr;
}

std::string libraries_of_nn() noexcept { return nn::cuda::describe_attention(); }

}  // namespace tessera::base::cuda
