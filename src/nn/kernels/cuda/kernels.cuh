// The kernel table of a CUDA device: it maps the functions of kernel_table.h to kernels and allocates scratch.
#pragma once

#include "tessera/base/device_stream.h"
#include "tessera/nn/kernels/cuda/attention.cuh"
#include "tessera/nn/kernels/cuda/cross_entropy.cuh"
#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/embedding.cuh"
#include "tessera/nn/kernels/cuda/library_tables.h"
#include "tessera/nn/kernels/cuda/norm.cuh"
#include "tessera/nn/kernels/cuda/optimizer.cuh"
#include "tessera/nn/kernels/cuda/quantization.cuh"
#include "tessera/nn/kernels/cuda/random.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

/// The native stream of a base stream, for kernel launches; makes its device current for the thread.
NativeStream native_stream(Stream& stream);

/// Calls function(T{}) with the C++ type of `dtype`: f32, f16 or bf16.
template <class Function>
void for_type(const char* kernel, DType dtype, const Function& function) {
  if (dtype == DType::f32) return function(float{});
  if (dtype == DType::f16) return function(f16{});
  if (dtype == DType::bf16) return function(bf16{});
  throw Unsupported(std::string(kernel) + ": no kernel for " + std::string(name_of(dtype)) + " on cuda");
}

template <class T>
class CudaKernels final : public KernelTable<T> {
 public:
  /// `attention` may be null.
  CudaKernels(MemoryPool& memory, MatmulKernels<T>& products, AttentionKernels<T>* attention)
      : memory_(memory), products_(products), attention_(attention) {}

  void fill(Stream& s, T value, T* out, std::size_t count) override {
    for_elements<kVector<T>>(native_stream(s), count, {out}, FillBody<T>{value, out});
  }
  void fill_normal(Stream& s, const NormalFill<T>& args) override { cuda::fill_normal(native_stream(s), args); }
  void fill_uniform(Stream& s, const UniformFill<T>& args) override { cuda::fill_uniform(native_stream(s), args); }
  void assign(Stream& s, const kernels::AssignArgs<T>& a) override {
    map(native_stream(s), a.count, MapBody<T, Same<OpMath<T>>>{a.x, a.out, a.accumulate, {}});
  }
  void add(Stream& s, const kernels::AddArgs<T>& a) override {
    zip(native_stream(s), a.count, ZipBody<T, Plus<OpMath<T>>>{a.a, a.b, a.out, false, {}});
  }
  void scale(Stream& s, const kernels::ScaleArgs<T>& a) override {
    map(native_stream(s), a.count, MapBody<T, Times<OpMath<T>>>{a.x, a.out, a.accumulate, {a.factor}});
  }
  void transpose(Stream& s, const TransposeArgs<T>& args) override { cuda::transpose(native_stream(s), args); }
  void norm_parts(Stream& s, const NormParts<T>& args) override {
    const Buffer scratch = get(norm_scratch(args));
    cuda::norm_parts(native_stream(s), args, static_cast<double*>(scratch.data()));
  }

  void activation_forward(Stream& s, const kernels::ActivationForward<T>& args) override {
    cuda::activation_forward(native_stream(s), args);
  }
  void activation_backward(Stream& s, Activation kind, const kernels::ActivationBackward<T>& args) override {
    cuda::activation_backward(native_stream(s), kind, args);
  }
  void swiglu_forward(Stream& s, const kernels::SwigluForward<T>& args) override {
    cuda::swiglu_forward(native_stream(s), args);
  }
  void swiglu_backward(Stream& s, const kernels::SwigluBackward<T>& args) override {
    cuda::swiglu_backward(native_stream(s), args);
  }
  void dropout(Stream& s, const kernels::DropoutArgs<T>& args) override { cuda::dropout(native_stream(s), args); }
  void rope(Stream& s, const kernels::RopeArgs<T>& args) override { cuda::rope(native_stream(s), args); }

  void norm_forward(Stream& s, const kernels::NormForward<T>& a) override {
    a.norm == RowNorm::layer ? cuda::norm_forward<T, true>(native_stream(s), a)
                             : cuda::norm_forward<T, false>(native_stream(s), a);
  }
  void norm_backward(Stream& s, const kernels::NormBackward<T>& a) override {
    const Buffer scratch = get(norm_scratch<T>(a.rows, a.width));
    auto* const sums = static_cast<OpMath<T>*>(scratch.data());
    a.norm == RowNorm::layer ? cuda::norm_backward<T, true>(native_stream(s), a, sums)
                             : cuda::norm_backward<T, false>(native_stream(s), a, sums);
  }

  void embedding_forward(Stream& s, const kernels::EmbeddingForward<T>& args) override {
    cuda::embedding_forward(native_stream(s), args);
  }
  void embedding_backward(Stream& s, const kernels::EmbeddingBackward<T>& args) override {
    const Buffer scratch = get(embedding_scratch<T>(args.rows, args.width));
    cuda::embedding_backward(native_stream(s), args, scratch.data());
  }
  void cross_entropy_forward(Stream& s, const kernels::MeanCrossEntropy<T>& args) override {
    const Buffer scratch = get(cross_entropy_scratch(args.rows.rows));
    cuda::cross_entropy_forward(native_stream(s), args, static_cast<double*>(scratch.data()));
  }
  void cross_entropy_backward(Stream& s, const kernels::MeanCrossEntropyBackward<T>& args) override {
    cuda::cross_entropy_backward(native_stream(s), args);
  }

  void linear_forward(Stream& s, const kernels::LinearForward<T>& args) override {
    const Epilogue done = products_.forward(s, args);
    if (args.bias && !done.bias)
      for_elements<1>(native_stream(s), args.shape.rows * args.shape.out, {},
                      RowBiasBody<T>{args.bias, args.y, args.shape.out});
    if (args.activated && !done.activation) activation_forward(s, kernels::activation_after(args));
  }
  void linear_backward(Stream& s, const kernels::LinearBackward<T>& args) override {
    if (products_.backward(s, args) || args.dbias == nullptr) return;
    const Buffer scratch = get(column_scratch<T>(args.shape.rows, args.shape.out, 1));
    column_sums<T>(native_stream(s), {args.dy, args.dbias, args.shape.rows, args.shape.out, args.accumulate_dbias},
                   static_cast<OpMath<T>*>(scratch.data()));
  }

  std::size_t attention_forward_scratch(const AttentionShape&) const override { return 0; }
  std::size_t attention_backward_scratch(const AttentionShape& shape) const override {
    return for_library(shape) ? 0 : cuda::attention_backward_scratch<T>(shape);  // it allocates what it needs
  }
  void attention_forward(Stream& s, const AttentionForward<T>& args) override {
    const NativeStream stream = native_stream(s);
    if (attention_ == nullptr || !attention_->forward(s, args)) cuda::attention_forward(stream, args);
  }
  void attention_backward(Stream& s, const AttentionBackward<T>& args) override {
    const NativeStream stream = native_stream(s);
    if (!for_library(args.shape)) return cuda::attention_backward(stream, args);
    if (attention_->backward(s, args)) return;
    const Buffer scratch = get(cuda::attention_backward_scratch<T>(args.shape));
    AttentionBackward<T> own = args;
    own.scratch = scratch.data();
    cuda::attention_backward(stream, own);
  }

  void sgd_step(Stream& s, const kernels::SgdStep<T>& args) override { update(s, args, "sgd"); }
  void adam_step(Stream& s, const kernels::AdamStep<T>& args) override { update(s, args, "adam"); }

 private:
  bool for_library(const AttentionShape& shape) const { return attention_ != nullptr && attention_->supports(shape); }

  /// Scratch, released when the call returns; later work on the compute stream reuses it.
  Buffer get(std::size_t bytes) { return memory_.allocate(bytes, MemoryCategory::activation); }

  /// Optimizers keep f32 or f64; half-precision parameters have master weights.
  template <class Step>
  static void update(Stream& s, const Step& step, const char* name) {
    if constexpr (sizeof(T) >= 4)
      optimizer_step(native_stream(s), step);
    else
      throw Unsupported(std::string(name) + ": no kernel for " + std::string(name_of(dtype_of<T>)) + " on cuda");
  }

  MemoryPool& memory_;
  MatmulKernels<T>& products_;
  AttentionKernels<T>* const attention_;
};

class CudaDeviceKernels final : public DeviceKernels {
 public:
  /// `attention` may be null.
  CudaDeviceKernels(MemoryPool& memory, std::unique_ptr<MatmulTable> products,
                    std::unique_ptr<AttentionTable> attention)
      : memory_(memory),
        products_(std::move(products)),
        attention_(std::move(attention)),
        f32_(memory, products_->f32_kernels(), nullptr),
        f64_(memory, products_->f64_kernels(), nullptr),
        f16_(memory, products_->f16_kernels(), attention_ ? &attention_->f16_kernels() : nullptr),
        bf16_(memory, products_->bf16_kernels(), attention_ ? &attention_->bf16_kernels() : nullptr) {}
  KernelTable<float>* f32_kernels() override { return &f32_; }
  KernelTable<double>* f64_kernels() override { return &f64_; }
  KernelTable<f16>* f16_kernels() override { return &f16_; }
  KernelTable<bf16>* bf16_kernels() override { return &bf16_; }

  std::int64_t row_multiple() const override { return kGpuRowMultiple; }
  std::string libraries() const override {
    return "products by " + products_->name() + ", attention by " +
           (attention_ ? attention_->name() : std::string(kOwnAttention));
  }
  void positions(Stream& s, std::int32_t* out, std::size_t count, std::size_t period) override {
    for_elements<4>(native_stream(s), count, {out}, PositionsBody{out, period});
  }
  void clip_factor(Stream& s, const ClipArgs& args) override { cuda::clip_factor(native_stream(s), args); }
  void convert(Stream& s, const ConvertArgs& a) override {
    const NativeStream stream = native_stream(s);
    const auto is = [&](DType from, DType to) { return a.from == from && a.to == to; };
    if (is(DType::f32, DType::bf16)) return cuda::convert<float, bf16>(stream, a);
    if (is(DType::bf16, DType::f32)) return cuda::convert<bf16, float>(stream, a);
    if (is(DType::f32, DType::f16)) return cuda::convert<float, f16>(stream, a);
    if (is(DType::f16, DType::f32)) return cuda::convert<f16, float>(stream, a);
    if (is(DType::f16, DType::bf16)) return cuda::convert<f16, bf16>(stream, a);
    if (is(DType::bf16, DType::f16)) return cuda::convert<bf16, f16>(stream, a);
    throw Unsupported("convert: no kernel from " + std::string(name_of(a.from)) + " to " + std::string(name_of(a.to)) +
                      " on cuda");
  }
  void compress(Stream& s, const CompressArgs& a) override {
    for_type("compress", a.from, [&](auto zero) { cuda::compress<decltype(zero)>(native_stream(s), a); });
  }
  void sum_compressed(Stream& s, const SumCompressedArgs& a) override {
    for_type("sum_compressed", a.to, [&](auto zero) { cuda::sum_compressed<decltype(zero)>(native_stream(s), a); });
  }
  void decode_nf4(Stream& s, const DecodeArgs& a) override {
    if (a.dtype == DType::f64) return cuda::decode_nf4<double>(native_stream(s), a);
    for_type("nf4", a.dtype, [&](auto zero) { cuda::decode_nf4<decltype(zero)>(native_stream(s), a); });
  }
  std::string fp8_reason() const override { return products_->fp8_reason(); }
  void fp8_quantize(Stream& s, const kernels::Fp8QuantizeArgs& a) override {
    check(a);
    const Buffer scratch = memory_.allocate(fp8_scratch(a), MemoryCategory::activation);
    auto* const tiles = static_cast<std::uint32_t*>(scratch.data());
    for_type("fp8", a.dtype, [&](auto zero) { cuda::fp8_quantize<decltype(zero)>(native_stream(s), a, tiles); });
  }
  void fp8_product(Stream& s, const kernels::Fp8ProductArgs& a) override {
    check(a);
    if (products_->fp8_product(s, a).bias || a.bias == nullptr) return;
    for_type("fp8", a.dtype, [&](auto zero) {
      using T = decltype(zero);
      for_elements<1>(native_stream(s), a.m * a.n, {},
                      RowBiasBody<T>{static_cast<const T*>(a.bias), static_cast<T*>(a.c), a.n});
    });
  }
  void orthonormalize(Stream& s, const kernels::OrthonormalizeArgs& args) override {
    cuda::orthonormalize(native_stream(s), args);
  }

 private:
  MemoryPool& memory_;
  const std::unique_ptr<MatmulTable> products_;
  const std::unique_ptr<AttentionTable> attention_;
  CudaKernels<float> f32_;
  CudaKernels<double> f64_;
  CudaKernels<f16> f16_;
  CudaKernels<bf16> bf16_;
};

}  // namespace tessera::nn::cuda
