// Kernels of the meta device, which do nothing. They allocate as much scratch as the kernels of the device that is
// planned for, so that the memory tracker of a run without data reports what the same run there needs.
#include <algorithm>
#include <optional>

#include "tessera/nn/kernels/half/half_kernels.h"

namespace tessera::nn {
namespace {

std::size_t up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// What this library's kernels on a GPU need for the backward (src/nn/kernels/cuda). For elements of 2 bytes: the
/// statistics of a row, dq in f32 unless one block has all keys, and counters of the blocks' turns; for others a sum
/// per row.
std::size_t gpu_attention_backward_scratch(const kernels::AttentionShape& s, std::size_t element_bytes) {
  const std::size_t heads = s.batch * s.heads;
  if (element_bytes != 2 || !s.causal || s.dim > 128 || s.scale < 0)
    return heads * s.positions * std::max(element_bytes, sizeof(float));
  const std::size_t rows = heads * up(s.positions, 64), dq = s.positions > 128 ? rows * up(s.dim, 64) : 0;
  return up(rows * 2 * sizeof(float), 64) + dq * sizeof(float) + up(rows / 64 * sizeof(std::uint32_t), 64) + 64;
}

/// What cuDNN's plans with fixed bits have as their workspace in the backward, and a sum per row (scripts/cudnn-plans
/// shows the plans'): the gradient of the scores. Nothing if cuDNN does not compute this call.
template <class T>
std::optional<std::size_t> cudnn_attention_workspace(const kernels::AttentionBackward<T>& a) {
  const kernels::AttentionShape& s = a.shape;
  if (sizeof(T) != 2 || !s.causal || s.positions < 2 || s.dim % 8 != 0 || s.dim > 128 || s.scale < 0 ||
      a.dropout.probability > 0 || a.accumulate_dq || a.accumulate_dk || a.accumulate_dv)
    return std::nullopt;
  const std::size_t heads = s.batch * s.heads;
  const std::size_t gradient = heads * up(s.positions, 64) * up(s.positions, 128) * sizeof(T);
  if (gradient > kernels::kMaxAttentionWorkspace) return std::nullopt;
  return gradient + heads * s.positions * sizeof(float);
}

template <class T>
class MetaKernels final : public KernelTable<T> {
 public:
  explicit MetaKernels(const KernelResources& r) : pool_(r.threads), memory_(r.memory), planned_(r.planned) {}
  void fill(Stream&, T, T*, std::size_t) override {}
  void fill_normal(Stream&, const NormalFill<T>&) override {}
  void fill_uniform(Stream&, const UniformFill<T>&) override {}
  void assign(Stream&, const kernels::AssignArgs<T>&) override {}
  void add(Stream&, const kernels::AddArgs<T>&) override {}
  void scale(Stream&, const kernels::ScaleArgs<T>&) override {}
  void transpose(Stream&, const TransposeArgs<T>&) override {}
  void norm_parts(Stream&, const NormParts<T>&) override {}
  void activation_forward(Stream&, const kernels::ActivationForward<T>&) override {}
  void activation_backward(Stream&, kernels::Activation, const kernels::ActivationBackward<T>&) override {}
  void swiglu_forward(Stream&, const kernels::SwigluForward<T>&) override {}
  void swiglu_backward(Stream&, const kernels::SwigluBackward<T>&) override {}
  void dropout(Stream&, const kernels::DropoutArgs<T>&) override {}
  void rope(Stream&, const kernels::RopeArgs<T>&) override {}
  void norm_forward(Stream&, const kernels::NormForward<T>&) override {}
  void norm_backward(Stream&, const kernels::NormBackward<T>&) override {}
  void embedding_forward(Stream&, const kernels::EmbeddingForward<T>&) override {}
  void embedding_backward(Stream&, const kernels::EmbeddingBackward<T>&) override {}
  void cross_entropy_forward(Stream&, const kernels::MeanCrossEntropy<T>&) override {}
  void cross_entropy_backward(Stream&, const kernels::MeanCrossEntropyBackward<T>&) override {}
  void linear_forward(Stream&, const kernels::LinearForward<T>&) override {}
  void linear_backward(Stream&, const kernels::LinearBackward<T>&) override {}
  void attention_forward(Stream&, const kernels::AttentionForward<T>&) override {}
  void attention_backward(Stream&, const kernels::AttentionBackward<T>& args) override {
    if (planned_ != PlannedKernels::gpu) return;
    const std::size_t bytes = cudnn_attention_workspace(args).value_or(own_scratch(args.shape));
    const Buffer released_at_once = memory_.allocate(bytes, MemoryCategory::activation);
  }
  void sgd_step(Stream&, const kernels::SgdStep<T>&) override {}
  void adam_step(Stream&, const kernels::AdamStep<T>&) override {}
  std::size_t attention_forward_scratch(const kernels::AttentionShape& shape) const override {
    return on_gpu() ? 0 : kernels::attention_forward_scratch_bytes(shape, pool_.threads(), sizeof(T));
  }
  std::size_t attention_backward_scratch(const kernels::AttentionShape& shape) const override {
    if (planned_ == PlannedKernels::gpu) return 0;  // allocated by the call, which may be cuDNN's
    return own_scratch(shape);
  }

 private:
  bool on_gpu() const { return planned_ != PlannedKernels::host; }
  std::size_t own_scratch(const kernels::AttentionShape& shape) const {
    return on_gpu() ? gpu_attention_backward_scratch(shape, sizeof(T))
                    : kernels::attention_backward_scratch_bytes(shape, pool_.threads(), sizeof(T));
  }

  ThreadPool& pool_;
  MemoryPool& memory_;
  const PlannedKernels planned_;
};

/// Allocates the f32 scratch that the host's kernels need.
template <class T>
class MetaHalfKernels final : public HalfKernels<T> {
 public:
  using HalfKernels<T>::HalfKernels;
  void embedding_forward(Stream&, const kernels::EmbeddingForward<T>&) override {}

 private:
  void product_forward(Stream&, const kernels::LinearForward<T>&) override {}
  void product_backward(Stream&, const kernels::LinearBackward<T>&) override {}
};

/// A GPU computes with half-precision numbers as they are, the host also with f32 copies.
class MetaDeviceKernels final : public DeviceKernels {
 public:
  explicit MetaDeviceKernels(const KernelResources& r)
      : gpu_(r.planned != PlannedKernels::host),
        f32_(r),
        f64_(r),
        gpu_f16_(r),
        gpu_bf16_(r),
        f16_(*this, r),
        bf16_(*this, r) {}
  KernelTable<float>* f32_kernels() override { return &f32_; }
  KernelTable<double>* f64_kernels() override { return &f64_; }
  KernelTable<f16>* f16_kernels() override {
    if (gpu_) return &gpu_f16_;
    return &f16_;
  }
  KernelTable<bf16>* bf16_kernels() override {
    if (gpu_) return &gpu_bf16_;
    return &bf16_;
  }
  std::int64_t row_multiple() const override { return gpu_ ? kGpuRowMultiple : 1; }
  void positions(Stream&, std::int32_t*, std::size_t, std::size_t) override {}
  void clip_factor(Stream&, const ClipArgs&) override {}
  void decode_nf4(Stream&, const DecodeArgs&) override {}
  void fp8_quantize(Stream&, const kernels::Fp8QuantizeArgs& args) override { check(args); }
  void fp8_product(Stream&, const kernels::Fp8ProductArgs& args) override { check(args); }
  void orthonormalize(Stream&, const kernels::OrthonormalizeArgs&) override {}
  void convert(Stream&, const ConvertArgs&) override {}
  void compress(Stream&, const kernels::CompressArgs&) override {}
  void sum_compressed(Stream&, const kernels::SumCompressedArgs&) override {}

 private:
  const bool gpu_;
  MetaKernels<float> f32_;
  MetaKernels<double> f64_;
  MetaKernels<f16> gpu_f16_;
  MetaKernels<bf16> gpu_bf16_;
  MetaHalfKernels<f16> f16_;
  MetaHalfKernels<bf16> bf16_;
};

}  // namespace

std::unique_ptr<DeviceKernels> make_kernels(const KernelResources& resources) {
  if (const KernelFactory* entry = resources.runtime.find<KernelFactory>()) return entry->make(resources);
  switch (resources.runtime.device().type) {
    case DeviceType::cpu:
      return make_host_kernels(resources);
    case DeviceType::meta:
      return std::make_unique<MetaDeviceKernels>(resources);
    default:
      throw Unsupported("device " + name_of(resources.runtime.device()) + " has no kernels for tensors");
  }
}

}  // namespace tessera::nn
