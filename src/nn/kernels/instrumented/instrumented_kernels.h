// A kernel table that passes each call, with its size, to an observer before another table runs it.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "tessera/nn/kernel_interceptor.h"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

/// Bytes count each operand once, as if it came from memory, but not vectors as short as a row. Products count two
/// operations per multiply-add. Attention counts two products over the causal half of the scores, and its backward
/// five.
template <class T>
class InstrumentedKernels final : public KernelTable<T> {
 public:
  InstrumentedKernels(KernelTable<T>& inner, KernelInterceptor& observer) : inner_(inner), observer_(observer) {}

  void fill(Stream& s, T value, T* out, std::size_t count) override {
    show("fill", s, {0, count}, [&] { inner_.fill(s, value, out, count); });
  }
  void fill_normal(Stream& s, const NormalFill<T>& a) override {
    show("fill_normal", s, written(a.range), [&] { inner_.fill_normal(s, a); });
  }
  void fill_uniform(Stream& s, const UniformFill<T>& a) override {
    show("fill_uniform", s, written(a.range), [&] { inner_.fill_uniform(s, a); });
  }
  void assign(Stream& s, const kernels::AssignArgs<T>& a) override {
    show_as("assign", s, 2 * a.count, {a.count + if_any(a.accumulate, a.count), a.count}, [&] { inner_.assign(s, a); });
  }
  void add(Stream& s, const kernels::AddArgs<T>& a) override {
    show("add", s, {2 * a.count, a.count}, [&] { inner_.add(s, a); });
  }
  void scale(Stream& s, const kernels::ScaleArgs<T>& a) override {
    show_as("scale", s, 2 * a.count, {a.count + if_any(a.accumulate, a.count), a.count}, [&] { inner_.scale(s, a); });
  }
  void transpose(Stream& s, const TransposeArgs<T>& a) override {
    const std::size_t count = a.batch * a.rows * a.columns;
    show("transpose", s, {count, count}, [&] { inner_.transpose(s, a); });
  }
  void norm_parts(Stream& s, const NormParts<T>& a) override {
    show("norm_part", s, {a.slices * a.count, 0}, [&] { inner_.norm_parts(s, a); });
  }

  void activation_forward(Stream& s, const kernels::ActivationForward<T>& a) override {
    show("activation_forward", s, {a.count, a.count}, [&] { inner_.activation_forward(s, a); });
  }
  void activation_backward(Stream& s, kernels::Activation kind, const kernels::ActivationBackward<T>& a) override {
    show_as("activation_backward", s, 3 * a.count, {2 * a.count + if_any(a.accumulate, a.count), a.count},
            [&] { inner_.activation_backward(s, kind, a); });
  }
  void swiglu_forward(Stream& s, const kernels::SwigluForward<T>& a) override {
    show("swiglu_forward", s, {2 * a.count, a.count}, [&] { inner_.swiglu_forward(s, a); });
  }
  void swiglu_backward(Stream& s, const kernels::SwigluBackward<T>& a) override {
    const std::size_t added = if_any(a.accumulate_dgate, a.count) + if_any(a.accumulate_dup, a.count);
    show_as("swiglu_backward", s, 5 * a.count, {3 * a.count + added, if_any(a.dgate, a.count) + if_any(a.dup, a.count)},
            [&] { inner_.swiglu_backward(s, a); });
  }
  void dropout(Stream& s, const kernels::DropoutArgs<T>& a) override {
    const std::size_t count = a.samples * a.elements;
    show_as("dropout", s, 2 * count, {count + if_any(a.accumulate, count), count}, [&] { inner_.dropout(s, a); });
  }
  void rope(Stream& s, const kernels::RopeArgs<T>& a) override {
    const std::size_t count = a.batch * a.positions * a.heads * a.dim;
    show_as("rope", s, 2 * count, {count + if_any(a.accumulate, count), count}, [&] { inner_.rope(s, a); });
  }

  void norm_forward(Stream& s, const kernels::NormForward<T>& args) override {
    const kernels::NormForward<T> a = observer_.splits_sums() ? this->add_first(s, args) : args;
    const std::size_t count = a.rows * a.width, sums = if_any(a.added, count);
    const bool layer = a.norm == kernels::RowNorm::layer;
    const std::string_view alone = layer ? "layer_norm_forward" : "rms_norm_forward",
                           both = layer ? "add_layer_norm_forward" : "add_rms_norm_forward";
    show(a.added ? both : alone, s, {count + sums, count + sums}, [&] { inner_.norm_forward(s, a); });
  }
  void norm_backward(Stream& s, const kernels::NormBackward<T>& a) override {
    const std::size_t count = a.rows * a.width;
    show_as(a.norm == kernels::RowNorm::layer ? "layer_norm_backward" : "rms_norm_backward", s, 3 * count,
            {2 * count + if_any(a.accumulate_dx, count), if_any(a.dx, count)}, [&] { inner_.norm_backward(s, a); });
  }

  void embedding_forward(Stream& s, const kernels::EmbeddingForward<T>& a) override {
    const std::size_t count = a.rows * a.width;
    show_as("embedding_forward", s, 2 * count, {count + if_any(a.accumulate, count), count},
            [&] { inner_.embedding_forward(s, a); });
  }
  void embedding_backward(Stream& s, const kernels::EmbeddingBackward<T>& a) override {
    const std::size_t count = a.rows * a.width, cleared = a.accumulate ? 0 : a.vocabulary * a.width;
    const std::size_t most = std::min(a.rows, a.vocabulary) * a.width;  // rows of the table, whatever the ids
    show_as("embedding_backward", s, 2 * count + cleared, {count + if_any(a.accumulate, most), most + cleared},
            [&] { inner_.embedding_backward(s, a); });
  }
  void cross_entropy_forward(Stream& s, const kernels::MeanCrossEntropy<T>& a) override {
    show("cross_entropy_forward", s, {a.rows.rows * a.rows.vocabulary, 0}, [&] { inner_.cross_entropy_forward(s, a); });
  }
  void cross_entropy_backward(Stream& s, const kernels::MeanCrossEntropyBackward<T>& a) override {
    const std::size_t logits = a.rows.rows * a.rows.vocabulary;
    show_as("cross_entropy_backward", s, 2 * logits, {logits + if_any(a.rows.accumulate, logits), logits},
            [&] { inner_.cross_entropy_backward(s, a); });
  }

  void linear_forward(Stream& s, const kernels::LinearForward<T>& a) override {
    const kernels::LinearShape& shape = a.shape;
    const std::size_t y = shape.rows * shape.out;
    product(a.activated ? "linear_activation_forward" : "linear_forward", s, {shape, 1},
            {shape.rows * shape.in + shape.in * shape.out, y + if_any(a.activated, y)},
            [&] { inner_.linear_forward(s, a); });
  }
  void linear_backward(Stream& s, const kernels::LinearBackward<T>& a) override {
    const std::size_t x = a.shape.rows * a.shape.in, weight = a.shape.in * a.shape.out, y = a.shape.rows * a.shape.out;
    const bool dbias_alone = a.dbias && !a.dweight;
    const Elements dx{y + weight + if_any(a.accumulate_dx, x), x},
        dweight{x + y + if_any(a.accumulate_dweight, weight), weight};
    product("linear_backward", s, {a.shape, (a.dx ? 1 : 0) + (a.dweight ? 1 : 0)},
            {if_any(a.dx, dx.read) + if_any(a.dweight, dweight.read) + if_any(dbias_alone, y),
             if_any(a.dx, dx.written) + if_any(a.dweight, dweight.written)},
            [&] { inner_.linear_backward(s, a); });
  }

  std::size_t attention_forward_scratch(const kernels::AttentionShape& shape) const override {
    return inner_.attention_forward_scratch(shape);
  }
  std::size_t attention_backward_scratch(const kernels::AttentionShape& shape) const override {
    return inner_.attention_backward_scratch(shape);
  }
  void attention_forward(Stream& s, const kernels::AttentionForward<T>& a) override {
    const bool dropout = a.dropout.probability > 0;
    const auto [queries, keys] = head_elements(a.shape);
    attention(dropout ? "attention_dropout_forward" : "attention_forward", s, {a.shape, 2},
              {queries + 2 * keys, queries}, [&] { inner_.attention_forward(s, a); });
  }
  void attention_backward(Stream& s, const kernels::AttentionBackward<T>& a) override {
    const bool dropout = a.dropout.probability > 0;
    const auto [queries, keys] = head_elements(a.shape);
    const std::size_t before =
        if_any(a.accumulate_dq, queries) + if_any(a.accumulate_dk, keys) + if_any(a.accumulate_dv, keys);
    attention(dropout ? "attention_dropout_backward" : "attention_backward", s, {a.shape, 5},
              {3 * queries + 2 * keys + before, queries + 2 * keys}, [&] { inner_.attention_backward(s, a); });
  }

  void sgd_step(Stream& s, const kernels::SgdStep<T>& a) override {
    update("sgd_step", s, a, a.momentum_buffer != nullptr ? 2 : 1, [&] { inner_.sgd_step(s, a); });
  }
  void adam_step(Stream& s, const kernels::AdamStep<T>& a) override {
    update("adam_step", s, a, a.max_second_moment != nullptr ? 4 : 3, [&] { inner_.adam_step(s, a); });
  }

 private:
  /// Elements that a call reads and writes.
  struct Elements {
    std::size_t read = 0, written = 0;
  };
  /// Products of one shape.
  struct Products {
    const kernels::LinearShape& shape;
    int count;
  };
  /// Products of the size of the scores: two in the forward, five in the backward.
  struct Scores {
    const kernels::AttentionShape& shape;
    int products;
  };

  static double bytes(std::size_t elements) { return static_cast<double>(elements * sizeof(T)); }
  static Elements written(const StreamRange& range) { return {0, static_cast<std::size_t>(range.end - range.begin)}; }
  static std::size_t if_any(bool any, std::size_t elements) { return any ? elements : 0; }

  template <class Run>
  void show(std::string_view kernel, Stream& stream, Elements moved, const Run& run) {
    show_as(kernel, stream, moved.read + moved.written, moved, run);
  }
  template <class Run>
  void show_as(std::string_view kernel, Stream& stream, std::size_t size, Elements moved, const Run& run) {
    observer_.call({.kernel = kernel,
                    .dtype = dtype_of<T>,
                    .size = bytes(size),
                    .reads = bytes(moved.read),
                    .writes = bytes(moved.written),
                    .product = {}},
                   stream, run);
  }
  /// `arrays`: number of those that the step updates; the gradient and the copy may be of half precision.
  template <class Step, class Run>
  void update(std::string_view kernel, Stream& stream, const Step& step, std::size_t arrays, const Run& run) {
    const auto half = static_cast<double>(step.count * size_of(step.half.dtype));
    const bool half_gradient = step.half.gradient != nullptr, copies = step.half.copy != nullptr;
    const double updated = bytes(arrays * step.count), gradient = bytes(step.count);
    observer_.call({.kernel = kernel,
                    .dtype = dtype_of<T>,
                    .size = 2 * updated + gradient,
                    .reads = updated + (half_gradient ? half : gradient),
                    .writes = updated + (copies ? half : 0.0),
                    .product = {}},
                   stream, run);
  }
  template <class Run>
  void product(std::string_view kernel, Stream& stream, const Products& products, Elements moved, const Run& run) {
    const kernels::LinearShape& shape = products.shape;
    const auto rows = static_cast<double>(shape.rows), in = static_cast<double>(shape.in),
               out = static_cast<double>(shape.out);
    observer_.call({.kernel = kernel,
                    .dtype = dtype_of<T>,
                    .size = 2.0 * products.count * rows * in * out,
                    .reads = bytes(moved.read),
                    .writes = bytes(moved.written),
                    .product = {static_cast<std::int64_t>(shape.rows), static_cast<std::int64_t>(shape.out),
                                static_cast<std::int64_t>(shape.in), products.count}},
                   stream, run);
  }
  /// Elements of a tensor with all query heads, and of one with all key heads.
  static std::pair<std::size_t, std::size_t> head_elements(const kernels::AttentionShape& shape) {
    const std::size_t of_head = shape.batch * shape.positions * shape.dim;
    return {of_head * shape.heads, of_head * shape.kv_heads};
  }
  /// Each operand counts once, though kernels read tiles of keys and values, or of queries, again from the cache. The
  /// sum of each row of scores is a number, which does not count.
  template <class Run>
  void attention(std::string_view kernel, Stream& stream, const Scores& scores, Elements moved, const Run& run) {
    const kernels::AttentionShape& shape = scores.shape;
    const auto heads = static_cast<double>(shape.batch * shape.heads), dim = static_cast<double>(shape.dim),
               positions = static_cast<double>(shape.positions);
    observer_.call(
        {.kernel = kernel,
         .dtype = dtype_of<T>,
         .size = scores.products * heads * dim * positions * (shape.causal ? positions + 1 : 2 * positions),
         .reads = bytes(moved.read),
         .writes = bytes(moved.written),
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
  std::string libraries() const override { return inner_->libraries(); }
  std::optional<Products> products() const override { return inner_->products(); }
  void positions(Stream& s, std::int32_t* out, std::size_t count, std::size_t period) override {
    show("positions", s, DType::i32, {0, count * sizeof *out}, [&] { inner_->positions(s, out, count, period); });
  }
  void clip_factor(Stream& s, const ClipArgs& a) override {
    show("clip_factor", s, DType::f64, {a.count * sizeof *a.parts, 0}, [&] { inner_->clip_factor(s, a); });
  }
  void convert(Stream& s, const ConvertArgs& a) override {
    show("convert", s, a.to, {a.count * size_of(a.from), a.count * size_of(a.to)}, [&] { inner_->convert(s, a); });
  }
  void compress(Stream& s, const kernels::CompressArgs& a) override {
    show("encode", s, a.from, {a.count * size_of(a.from), compressed_bytes(a.compression, a.count)},
         [&] { inner_->compress(s, a); });
  }
  void sum_compressed(Stream& s, const kernels::SumCompressedArgs& a) override {
    show("sum_encoded", s, a.to, {a.sources * compressed_bytes(a.compression, a.count), a.count * size_of(a.to)},
         [&] { inner_->sum_compressed(s, a); });
  }
  void decode_nf4(Stream& s, const DecodeArgs& a) override {
    show("decode_nf4", s, a.dtype, {0, static_cast<std::size_t>(a.count) * size_of(a.dtype)},
         [&] { inner_->decode_nf4(s, a); });
  }
  std::string fp8_reason() const override { return inner_->fp8_reason(); }
  void fp8_quantize(Stream& s,
                    const kernels::Fp8QuantizeArgs& a) override {  // a scale from the input reads it once more
    const std::size_t count = a.rows * a.columns, reads = a.scaling == Fp8Scaling::current ? 2 : 1;
    const std::size_t writes = (a.out != nullptr ? 1 : 0) + (a.transposed != nullptr ? 1 : 0);
    show("fp8_quantize", s, a.dtype, {count * reads * size_of(a.dtype), count * writes},
         [&] { inner_->fp8_quantize(s, a); });
  }
  void fp8_product(Stream& s, const kernels::Fp8ProductArgs& a) override {
    const auto m = static_cast<double>(a.m), n = static_cast<double>(a.n), k = static_cast<double>(a.k);
    const double operands = m * k + n * k, result = m * n * static_cast<double>(size_of(a.dtype));
    observer_.call({.kernel = "fp8_product",
                    .dtype = a.dtype,
                    .size = 2 * m * n * k,
                    .reads = operands + (a.accumulate ? result : 0),
                    .writes = result,
                    .product = {static_cast<std::int64_t>(a.m), static_cast<std::int64_t>(a.n),
                                static_cast<std::int64_t>(a.k), 1}},
                   s, [&] { inner_->fp8_product(s, a); });
  }
  void orthonormalize(Stream& s, const kernels::OrthonormalizeArgs& a) override {  // each column reads those before
    show("orthonormalize", s, DType::f32, {a.rows * a.columns * a.columns * sizeof(float), 0},
         [&] { inner_->orthonormalize(s, a); });
  }

 private:
  struct Bytes {
    std::size_t read = 0, written = 0;
  };
  template <class T>
  std::unique_ptr<KernelTable<T>> observed(KernelTable<T>* inner) {
    if (inner == nullptr) return nullptr;
    return std::make_unique<InstrumentedKernels<T>>(*inner, observer_);
  }
  template <class Run>
  void show(std::string_view kernel, Stream& stream, DType dtype, Bytes moved, const Run& run) {
    const auto reads = static_cast<double>(moved.read), writes = static_cast<double>(moved.written);
    observer_.call(
        {.kernel = kernel, .dtype = dtype, .size = reads + writes, .reads = reads, .writes = writes, .product = {}},
        stream, run);
  }

  const std::unique_ptr<DeviceKernels> inner_;
  KernelInterceptor& observer_;
  const std::unique_ptr<KernelTable<float>> f32_;
  const std::unique_ptr<KernelTable<double>> f64_;
  const std::unique_ptr<KernelTable<f16>> f16_;
  const std::unique_ptr<KernelTable<bf16>> bf16_;
};

}  // namespace tessera::nn
