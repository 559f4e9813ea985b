// A kernel table that passes each call, with its size, to an observer before another table runs it.
#pragma once

#include <memory>
#include <utility>

#include "tessera/nn/kernel_interceptor.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

/// Sizes: bytes count each operand once, as if it came from memory. Products count two operations per multiply-add.
/// Attention counts two products over the causal half of the scores, and its backward five.
template <class T>
class InstrumentedKernels final : public KernelTable<T> {
 public:
  InstrumentedKernels(KernelTable<T>& inner, KernelInterceptor& observer) : inner_(inner), observer_(observer) {}

  void fill(Stream& s, T value, T* out, std::size_t count) override {
    show("fill", s, bytes(count), [&] { inner_.fill(s, value, out, count); });
  }
  void fill_normal(Stream& s, const NormalFill<T>& a) override {
    show("fill_normal", s, bytes(a.range), [&] { inner_.fill_normal(s, a); });
  }
  void fill_uniform(Stream& s, const UniformFill<T>& a) override {
    show("fill_uniform", s, bytes(a.range), [&] { inner_.fill_uniform(s, a); });
  }
  void assign(Stream& s, const kernels::AssignArgs<T>& a) override {
    show("assign", s, bytes(2 * a.count), [&] { inner_.assign(s, a); });
  }
  void add(Stream& s, const kernels::AddArgs<T>& a) override {
    show("add", s, bytes(3 * a.count), [&] { inner_.add(s, a); });
  }
  void scale(Stream& s, const kernels::ScaleArgs<T>& a) override {
    show("scale", s, bytes(2 * a.count), [&] { inner_.scale(s, a); });
  }
  void transpose(Stream& s, const TransposeArgs<T>& a) override {
    show("transpose", s, bytes(2 * a.batch * a.rows * a.columns), [&] { inner_.transpose(s, a); });
  }
  void norm_parts(Stream& s, const NormParts<T>& a) override {
    show("norm_part", s, bytes(a.slices * a.count), [&] { inner_.norm_parts(s, a); });
  }

  void activation_forward(Stream& s, const kernels::ActivationForward<T>& a) override {
    show("activation_forward", s, bytes(2 * a.count), [&] { inner_.activation_forward(s, a); });
  }
  void activation_backward(Stream& s, kernels::Activation kind, const kernels::ActivationBackward<T>& a) override {
    show("activation_backward", s, bytes(3 * a.count), [&] { inner_.activation_backward(s, kind, a); });
  }
  void swiglu_forward(Stream& s, const kernels::SwigluForward<T>& a) override {
    show("swiglu_forward", s, bytes(3 * a.count), [&] { inner_.swiglu_forward(s, a); });
  }
  void swiglu_backward(Stream& s, const kernels::SwigluBackward<T>& a) override {
    show("swiglu_backward", s, bytes(5 * a.count), [&] { inner_.swiglu_backward(s, a); });
  }
  void dropout(Stream& s, const kernels::DropoutArgs<T>& a) override {
    show("dropout", s, bytes(2 * a.samples * a.elements), [&] { inner_.dropout(s, a); });
  }
  void rope(Stream& s, const kernels::RopeArgs<T>& a) override {
    show("rope", s, bytes(2 * a.batch * a.positions * a.heads * a.dim), [&] { inner_.rope(s, a); });
  }

  // A sum and its norm are two calls here, which every device has and whose costs are known.
  void layer_norm_forward(Stream& s, const kernels::LayerNormForward<T>& args) override {
    const kernels::LayerNormForward<T> a = this->add_first(s, args);
    show("layer_norm_forward", s, bytes(2 * a.rows * a.width), [&] { inner_.layer_norm_forward(s, a); });
  }
  void layer_norm_backward(Stream& s, const kernels::LayerNormBackward<T>& a) override {
    show("layer_norm_backward", s, bytes(3 * a.rows * a.width), [&] { inner_.layer_norm_backward(s, a); });
  }
  void rms_norm_forward(Stream& s, const kernels::RmsNormForward<T>& args) override {
    const kernels::RmsNormForward<T> a = this->add_first(s, args);
    show("rms_norm_forward", s, bytes(2 * a.rows * a.width), [&] { inner_.rms_norm_forward(s, a); });
  }
  void rms_norm_backward(Stream& s, const kernels::RmsNormBackward<T>& a) override {
    show("rms_norm_backward", s, bytes(3 * a.rows * a.width), [&] { inner_.rms_norm_backward(s, a); });
  }

  void embedding_forward(Stream& s, const kernels::EmbeddingForward<T>& a) override {
    show("embedding_forward", s, bytes(2 * a.rows * a.width), [&] { inner_.embedding_forward(s, a); });
  }
  void embedding_backward(Stream& s, const kernels::EmbeddingBackward<T>& a) override {
    const std::size_t cleared = a.accumulate ? 0 : a.vocabulary * a.width;
    show("embedding_backward", s, bytes(2 * a.rows * a.width + cleared), [&] { inner_.embedding_backward(s, a); });
  }
  void cross_entropy_forward(Stream& s, const kernels::MeanCrossEntropy<T>& a) override {
    show("cross_entropy_forward", s, bytes(a.rows.rows * a.rows.vocabulary),
         [&] { inner_.cross_entropy_forward(s, a); });
  }
  void cross_entropy_backward(Stream& s, const kernels::MeanCrossEntropyBackward<T>& a) override {
    show("cross_entropy_backward", s, bytes(2 * a.rows.rows * a.rows.vocabulary),
         [&] { inner_.cross_entropy_backward(s, a); });
  }

  void linear_forward(Stream& s, const kernels::LinearForward<T>& a) override {
    const bool activates = a.activated != nullptr;
    product(activates ? "linear_activation_forward" : "linear_forward", s, a.shape, 1,
            [&] { inner_.linear_forward(s, a); });
  }
  void linear_backward(Stream& s, const kernels::LinearBackward<T>& a) override {
    const int products = (a.dx != nullptr ? 1 : 0) + (a.dweight != nullptr ? 1 : 0);
    product("linear_backward", s, a.shape, products, [&] { inner_.linear_backward(s, a); });
  }

  std::size_t attention_forward_scratch(const kernels::AttentionShape& shape) const override {
    return inner_.attention_forward_scratch(shape);
  }
  std::size_t attention_backward_scratch(const kernels::AttentionShape& shape) const override {
    return inner_.attention_backward_scratch(shape);
  }
  void attention_forward(Stream& s, const kernels::AttentionForward<T>& a) override {
    const bool dropout = a.dropout.probability > 0;
    attention(dropout ? "attention_dropout_forward" : "attention_forward", s, a.shape, 2,
              [&] { inner_.attention_forward(s, a); });
  }
  void attention_backward(Stream& s, const kernels::AttentionBackward<T>& a) override {
    const bool dropout = a.dropout.probability > 0;
    attention(dropout ? "attention_dropout_backward" : "attention_backward", s, a.shape, 5,
              [&] { inner_.attention_backward(s, a); });
  }

  void sgd_step(Stream& s, const kernels::SgdStep<T>& a) override {
    show("sgd_step", s, bytes((a.momentum_buffer != nullptr ? 5 : 3) * a.count), [&] { inner_.sgd_step(s, a); });
  }
  void adam_step(Stream& s, const kernels::AdamStep<T>& a) override {
    show("adam_step", s, bytes(7 * a.count), [&] { inner_.adam_step(s, a); });
  }

 private:
  static double bytes(std::size_t elements) { return static_cast<double>(elements * sizeof(T)); }
  static double bytes(const StreamRange& range) { return bytes(static_cast<std::size_t>(range.end - range.begin)); }
  template <class Run>
  void show(std::string_view kernel, Stream& stream, double size, const Run& run) {
    observer_.call({.kernel = kernel, .dtype = dtype_of<T>, .size = size, .bytes = size, .product = {}}, stream, run);
  }
  template <class Run>
  void product(std::string_view kernel, Stream& stream, const kernels::LinearShape& shape, int products,
               const Run& run) {
    const auto rows = static_cast<double>(shape.rows), in = static_cast<double>(shape.in),
               out = static_cast<double>(shape.out);
    observer_.call({.kernel = kernel,
                    .dtype = dtype_of<T>,
                    .size = 2.0 * products * rows * in * out,
                    .bytes = products * (rows * in + in * out + rows * out) * sizeof(T),
                    .product = {static_cast<std::int64_t>(shape.rows), static_cast<std::int64_t>(shape.out),
                                static_cast<std::int64_t>(shape.in), products}},
                   stream, run);
  }
  /// `products`: over the scores. Forward reads three tensors of heads and writes one; backward reads five, writes
  /// three.
  template <class Run>
  void attention(std::string_view kernel, Stream& stream, const kernels::AttentionShape& shape, int products,
                 const Run& run) {
    const auto heads = static_cast<double>(shape.batch * shape.heads), dim = static_cast<double>(shape.dim),
               positions = static_cast<double>(shape.positions);
    observer_.call(
        {.kernel = kernel,
         .dtype = dtype_of<T>,
         .size = products * heads * dim * positions * (positions + 1),
         .bytes = (products == 2 ? 4 : 8) * heads * dim * positions * sizeof(T),
         .product = {static_cast<std::int64_t>(shape.positions), static_cast<std::int64_t>(shape.positions),
                     static_cast<std::int64_t>(shape.dim), static_cast<std::int64_t>(shape.batch * shape.heads)}},
        stream, run);
  }

  KernelTable<T>& inner_;
  KernelInterceptor& observer_;
};

class InstrumentedDeviceKernels final : public DeviceKernels {
 public:
  InstrumentedDeviceKernels(std::unique_ptr<DeviceKernels> inner, KernelInterceptor& observer)
      : inner_(std::move(inner)),
        observer_(observer),
        f32_(observed(inner_->f32_kernels())),
        f64_(observed(inner_->f64_kernels())),
        f16_(observed(inner_->f16_kernels())),
        bf16_(observed(inner_->bf16_kernels())) {}

  KernelTable<float>* f32_kernels() override { return f32_.get(); }
  KernelTable<double>* f64_kernels() override { return f64_.get(); }
  KernelTable<f16>* f16_kernels() override { return f16_.get(); }
  KernelTable<bf16>* bf16_kernels() override { return bf16_.get(); }

  std::int64_t row_multiple() const override { return inner_->row_multiple(); }
  void positions(Stream& s, std::int32_t* out, std::size_t count, std::size_t period) override {
    show("positions", s, DType::i32, count * sizeof *out, [&] { inner_->positions(s, out, count, period); });
  }
  void clip_factor(Stream& s, const ClipArgs& a) override {
    show("clip_factor", s, DType::f64, a.count * sizeof *a.parts, [&] { inner_->clip_factor(s, a); });
  }
  void convert(Stream& s, const ConvertArgs& a) override {
    show("convert", s, a.to, a.count * (size_of(a.from) + size_of(a.to)), [&] { inner_->convert(s, a); });
  }
  void compress(Stream& s, const kernels::CompressArgs& a) override {
    const std::size_t bytes = a.count * size_of(a.from) + compressed_bytes(a.compression, a.count);
    show("encode", s, a.from, bytes, [&] { inner_->compress(s, a); });
  }
  void sum_compressed(Stream& s, const kernels::SumCompressedArgs& a) override {
    const std::size_t bytes = a.count * size_of(a.to) + a.sources * compressed_bytes(a.compression, a.count);
    show("sum_encoded", s, a.to, bytes, [&] { inner_->sum_compressed(s, a); });
  }
  void decode_nf4(Stream& s, const DecodeArgs& a) override {
    show("decode_nf4", s, a.dtype, static_cast<std::size_t>(a.count) * size_of(a.dtype),
         [&] { inner_->decode_nf4(s, a); });
  }
  void orthonormalize(Stream& s, const kernels::OrthonormalizeArgs& a) override {  // each column reads those before
    show("orthonormalize", s, DType::f32, a.rows * a.columns * a.columns * sizeof(float),
         [&] { inner_->orthonormalize(s, a); });
  }

 private:
  template <class T>
  std::unique_ptr<KernelTable<T>> observed(KernelTable<T>* inner) {
    if (inner == nullptr) return nullptr;
    return std::make_unique<InstrumentedKernels<T>>(*inner, observer_);
  }
  template <class Run>
  void show(std::string_view kernel, Stream& stream, DType dtype, std::size_t bytes, const Run& run) {
    const auto size = static_cast<double>(bytes);
    observer_.call({.kernel = kernel, .dtype = dtype, .size = size, .bytes = size, .product = {}}, stream, run);
  }

  const std::unique_ptr<DeviceKernels> inner_;
  KernelInterceptor& observer_;
  const std::unique_ptr<KernelTable<float>> f32_;
  const std::unique_ptr<KernelTable<double>> f64_;
  const std::unique_ptr<KernelTable<f16>> f16_;
  const std::unique_ptr<KernelTable<bf16>> bf16_;
};

}  // namespace tessera::nn
