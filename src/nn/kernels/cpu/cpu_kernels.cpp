// Kernel table of the host: each function submits a kernel of kernels/ to the stream. It captures all arguments by
// value, because a stream may run it later.
#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/half/half_kernels.h"
#include "tessera/nn/kernels/kernel_table.h"
#include "tessera/nn/nf4.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn {

using namespace kernels;  // NOLINT: this file is their table

namespace {

template <class T>
void decode_on(ThreadPool& pool, const DecodeArgs& args) {
  constexpr std::int64_t kTile = 4096;
  pool.parallel_for(static_cast<std::size_t>((args.count + kTile - 1) / kTile), [&](std::size_t tile) {
    const std::int64_t begin = static_cast<std::int64_t>(tile) * kTile, end = std::min(begin + kTile, args.count);
    float values[kTile];
    nn::decode_nf4({static_cast<const std::byte*>(args.encoded), nf4_bytes(args.count)}, args.count, {begin, end},
                   values);
    for (std::int64_t i = begin; i < end; ++i) static_cast<T*>(args.out)[i] = static_cast<T>(values[i - begin]);
  });
}

template <class T>
void transpose_on(ThreadPool& pool, const TransposeArgs<T>& args) {
  pool.parallel_for(args.batch, [&](std::size_t b) {
    const T* in = args.in + b * args.rows * args.columns;
    T* out = args.out + b * args.rows * args.columns;
    for (std::size_t r = 0; r < args.rows; ++r)
      for (std::size_t c = 0; c < args.columns; ++c) out[c * args.rows + r] = in[r * args.columns + c];
  });
}

template <class T>
class CpuKernels final : public KernelTable<T> {
 public:
  explicit CpuKernels(const KernelResources& r) : pool_(r.threads), products_(r.products) {}

  void fill(Stream& s, T value, T* out, std::size_t count) override {
    s.run([=, &pool = pool_] { kernels::fill<T>(pool, value, out, count); });
  }
  void fill_normal(Stream& s, const NormalFill<T>& args) override {
    s.run([args] { nn::fill_normal(args.range, args.mean, args.deviation, args.out); });
  }
  void fill_uniform(Stream& s, const UniformFill<T>& args) override {
    s.run([args] { nn::fill_uniform(args.range, args.low, args.high, args.out); });
  }
  void assign(Stream& s, const AssignArgs<T>& args) override {
    s.run([args, &pool = pool_] { kernels::assign<T>(pool, args.x, args.out, args.count, args.accumulate); });
  }
  void add(Stream& s, const AddArgs<T>& args) override {
    s.run([args, &pool = pool_] { kernels::add<T>(pool, args.a, args.b, args.out, args.count); });
  }
  void scale(Stream& s, const ScaleArgs<T>& args) override { launch(s, args, kernels::scale<T>); }
  void transpose(Stream& s, const TransposeArgs<T>& args) override { launch(s, args, transpose_on<T>); }
  void norm_parts(Stream& s, const NormParts<T>& args) override {
    s.run([a = args, &pool = pool_] {
      for (std::size_t i = 0; i < a.slices; ++i)
        a.out[i] = kernels::norm_part<T>(pool, a.norm, a.x + i * a.count, a.count);
    });
  }

  void activation_forward(Stream& s, const ActivationForward<T>& args) override {
    s.run([args, &pool = pool_] { kernels::activation_forward<T>(pool, args.kind, args.x, args.y, args.count); });
  }
  void activation_backward(Stream& s, Activation kind, const ActivationBackward<T>& args) override {
    s.run([args, kind, &pool = pool_] { kernels::activation_backward<T>(pool, kind, args); });
  }
  void swiglu_forward(Stream& s, const SwigluForward<T>& args) override {
    s.run([args, &pool = pool_] { kernels::swiglu_forward<T>(pool, args.gate, args.up, args.y, args.count); });
  }
  void swiglu_backward(Stream& s, const SwigluBackward<T>& args) override {
    launch(s, args, kernels::swiglu_backward<T>);
  }
  void dropout(Stream& s, const DropoutArgs<T>& args) override { launch(s, args, kernels::dropout<T>); }
  void rope(Stream& s, const RopeArgs<T>& args) override { launch(s, args, kernels::rope<T>); }

  void norm_forward(Stream& s, const NormForward<T>& args) override {
    launch(s, this->add_first(s, args), kernels::norm_forward<T>);
  }
  void norm_backward(Stream& s, const NormBackward<T>& args) override { launch(s, args, kernels::norm_backward<T>); }

  void embedding_forward(Stream& s, const EmbeddingForward<T>& args) override {
    launch(s, args, kernels::embedding_forward<T>);
  }
  void embedding_backward(Stream& s, const EmbeddingBackward<T>& args) override {
    launch(s, args, kernels::embedding_backward<T>);
  }
  void cross_entropy_forward(Stream& s, const MeanCrossEntropy<T>& args) override {
    s.run([args, &pool = pool_] {
      const CrossEntropyResult result = kernels::cross_entropy_forward<T>(pool, args.rows);
      *args.valid = static_cast<double>(result.valid);
      *args.loss = result.valid == 0 ? 0.0 : result.loss_sum / *args.valid;
    });
  }
  void cross_entropy_backward(Stream& s, const MeanCrossEntropyBackward<T>& args) override {
    s.run([args, &pool = pool_] {
      CrossEntropyBackward<T> rows = args.rows;
      rows.scale = *args.valid == 0.0 ? T(0) : static_cast<T>(*args.upstream / *args.valid);
      kernels::cross_entropy_backward<T>(pool, rows);
    });
  }

  void linear_forward(Stream& s, const LinearForward<T>& a) override {
    s.run([a, &pool = pool_, products = products_] { kernels::linear_forward<T>(pool, a, products); });
    if (a.activated != nullptr) activation_forward(s, activation_after(a));
  }
  void linear_backward(Stream& s, const LinearBackward<T>& args) override {
    s.run([args, &pool = pool_, products = products_] { kernels::linear_backward<T>(pool, args, products); });
  }

  std::size_t attention_forward_scratch(const AttentionShape& shape) const override {
    return attention_forward_scratch_bytes(shape, pool_.threads(), sizeof(T));
  }
  std::size_t attention_backward_scratch(const AttentionShape& shape) const override {
    return attention_backward_scratch_bytes(shape, pool_.threads(), sizeof(T));
  }
  void attention_forward(Stream& s, const AttentionForward<T>& args) override {
    launch(s, args, kernels::attention_forward<T>);
  }
  void attention_backward(Stream& s, const AttentionBackward<T>& args) override {
    launch(s, args, kernels::attention_backward<T>);
  }

  void sgd_step(Stream& s, const SgdStep<T>& args) override {
    kernels::for_each_part(args, [&](const SgdStep<T>& part) { launch(s, part, kernels::sgd_step<T>); });
  }
  void adam_step(Stream& s, const AdamStep<T>& args) override {
    kernels::for_each_part(args, [&](const AdamStep<T>& part) { launch(s, part, kernels::adam_step<T>); });
  }

 private:
  template <class Arguments>
  void launch(Stream& stream, const Arguments& args, void (*kernel)(ThreadPool&, const Arguments&)) {
    stream.run([args, kernel, &pool = pool_] { kernel(pool, args); });
  }
  ThreadPool& pool_;
  const Products products_;
};

/// f32 kernels between conversions. Row lookups need no conversions, nor do products that take T.
template <class T>
class CpuHalfKernels final : public HalfKernels<T> {
 public:
  CpuHalfKernels(DeviceKernels& all, const KernelResources& r)
      : HalfKernels<T>(all, r), pool_(r.threads), products_(r.products) {}
  void embedding_forward(Stream& s, const EmbeddingForward<T>& args) override {
    s.run([args, &pool = pool_] { kernels::embedding_forward<T>(pool, args); });
  }

 private:
  void product_forward(Stream& s, const LinearForward<T>& args) override {
    s.run([args, &pool = pool_, products = products_] { kernels::linear_forward<T>(pool, args, products); });
  }
  void product_backward(Stream& s, const LinearBackward<T>& args) override {
    s.run([args, &pool = pool_, products = products_] { kernels::linear_backward<T>(pool, args, products); });
  }
  ThreadPool& pool_;
  const Products products_;
};

double whole_norm(const ClipArgs& a) {
  double total = 0;
  for (std::size_t i = 0; i < a.count; ++i) {
    const double part = a.parts[i];
    if (a.norm != kernels::Norm::infinity) {
      total += part;
    } else if (part > total || std::isnan(part)) {
      total = part;
    }
  }
  if (a.norm == kernels::Norm::two) return std::sqrt(total);
  return a.norm == kernels::Norm::three ? base::portable::cube_root(total) : total;
}

class CpuDeviceKernels final : public DeviceKernels {
 public:
  explicit CpuDeviceKernels(const KernelResources& r)
      : pool_(r.threads), products_(r.products), f32_(r), f64_(r), f16_(*this, r), bf16_(*this, r) {}
  KernelTable<float>* f32_kernels() override { return &f32_; }
  KernelTable<double>* f64_kernels() override { return &f64_; }
  KernelTable<f16>* f16_kernels() override { return &f16_; }
  KernelTable<bf16>* bf16_kernels() override { return &bf16_; }

  std::string libraries() const override { return "products by " + kernels::products_name(products_); }
  std::optional<Products> products() const override { return products_; }
  void positions(Stream& s, std::int32_t* out, std::size_t count, std::size_t period) override {
    s.run([=] {
      for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(i % period);
    });
  }
  void clip_factor(Stream& s, const ClipArgs& args) override {
    s.run([args] {
      const double norm = whole_norm(args) / args.loss_scale;
      args.out[0] = norm;
      // As in torch.nn.utils.clip_grad_norm_: the small constant keeps the factor finite.
      const double factor = args.most ? std::min(1.0, *args.most / (norm + 1e-6)) : 1.0;
      args.out[1] = args.skips && !std::isfinite(norm) ? std::nan("") : factor / args.loss_scale;
    });
  }
  void convert(Stream& s, const ConvertArgs& args) override {
    s.run([args, &pool = pool_] { kernels::convert(pool, args); });
  }
  void decode_nf4(Stream& s, const DecodeArgs& args) override {
    ops::for_floating("nf4", args.dtype,
                      [&](auto zero) { s.run([args, &pool = pool_] { decode_on<decltype(zero)>(pool, args); }); });
  }
  void fp8_quantize(Stream& s, const Fp8QuantizeArgs& args) override {
    check(args);
    s.run([args, &pool = pool_] { kernels::fp8_quantize(pool, args); });
  }
  void fp8_product(Stream& s, const Fp8ProductArgs& args) override {
    check(args);
    s.run([args, &pool = pool_, products = products_] { kernels::fp8_product(pool, args, products); });
  }
  void orthonormalize(Stream& s, const OrthonormalizeArgs& args) override {
    s.run([args] { kernels::orthonormalize(args); });
  }
  void compress(Stream& s, const CompressArgs& args) override {
    s.run([args, &pool = pool_] { kernels::compress(pool, args); });
  }
  void sum_compressed(Stream& s, const SumCompressedArgs& args) override {
    s.run([args, &pool = pool_] { kernels::sum_compressed(pool, args); });
  }

 private:
  ThreadPool& pool_;
  const Products products_;
  CpuKernels<float> f32_;
  CpuKernels<double> f64_;
  CpuHalfKernels<f16> f16_;
  CpuHalfKernels<bf16> bf16_;
};

}  // namespace

DeviceKernels::~DeviceKernels() = default;

std::unique_ptr<DeviceKernels> make_host_kernels(const KernelResources& resources) {
  return std::make_unique<CpuDeviceKernels>(resources);
}

}  // namespace tessera::nn
