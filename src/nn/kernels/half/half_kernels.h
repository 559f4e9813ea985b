// Half-precision kernels built from a device's f32 kernels: inputs are converted to f32 in scratch of the pool, the f32
// kernel runs, and its outputs are rounded once. Scratch follows the order of the compute stream, so this works on
// streams that run work later.
#pragma once

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

/// For half-precision T. Devices override functions that they implement better.
template <class T>
class HalfKernels : public KernelTable<T> {
 public:
  /// `all` provides the f32 and f64 kernels and the conversions; `all` and the resources must outlive this object.
  HalfKernels(DeviceKernels& all, const KernelResources& r) : all_(all), memory_(r.memory), products_(r.products) {}

  void fill(Stream& stream, T value, T* out, std::size_t count) override;
  void fill_normal(Stream& stream, const NormalFill<T>& args) override;
  void fill_uniform(Stream& stream, const UniformFill<T>& args) override;
  void assign(Stream& stream, const kernels::AssignArgs<T>& args) override;
  void add(Stream& stream, const kernels::AddArgs<T>& args) override;
  void scale(Stream& stream, const kernels::ScaleArgs<T>& args) override;
  void transpose(Stream& stream, const TransposeArgs<T>& args) override;
  void norm_parts(Stream& stream, const NormParts<T>& args) override;

  void activation_forward(Stream& stream, const kernels::ActivationForward<T>& args) override;
  void activation_backward(Stream& stream, kernels::Activation kind, const kernels::ActivationBackward<T>&) override;
  void swiglu_forward(Stream& stream, const kernels::SwigluForward<T>& args) override;
  void swiglu_backward(Stream& stream, const kernels::SwigluBackward<T>& args) override;
  void dropout(Stream& stream, const kernels::DropoutArgs<T>& args) override;
  void rope(Stream& stream, const kernels::RopeArgs<T>& args) override;

  void norm_forward(Stream& stream, const kernels::NormForward<T>& args) override;
  void norm_backward(Stream& stream, const kernels::NormBackward<T>& args) override;

  void embedding_backward(Stream& stream, const kernels::EmbeddingBackward<T>& args) override;
  void cross_entropy_forward(Stream& stream, const kernels::MeanCrossEntropy<T>& args) override;
  void cross_entropy_backward(Stream& stream, const kernels::MeanCrossEntropyBackward<T>& args) override;

  void linear_forward(Stream& stream, const kernels::LinearForward<T>& args) override;
  void linear_backward(Stream& stream, const kernels::LinearBackward<T>& args) override;

  std::size_t attention_forward_scratch(const kernels::AttentionShape& shape) const override;
  std::size_t attention_backward_scratch(const kernels::AttentionShape& shape) const override;
  void attention_forward(Stream& stream, const kernels::AttentionForward<T>& args) override;
  void attention_backward(Stream& stream, const kernels::AttentionBackward<T>& args) override;

  /// Throws Unsupported: optimizers keep f32; half-precision parameters have master weights.
  void sgd_step(Stream& stream, const kernels::SgdStep<T>& args) override;
  void adam_step(Stream& stream, const kernels::AdamStep<T>& args) override;

 protected:
  /// Products of elements of T as they are, where the host has them: y, and dx and dweight. They need no scratch.
  virtual void product_forward(Stream& stream, const kernels::LinearForward<T>& args) = 0;
  virtual void product_backward(Stream& stream, const kernels::LinearBackward<T>& args) = 0;

 private:
  bool has_product(const kernels::LinearShape& shape) const {
    return kernels::has_product(products_, dtype_of<T>) && shape.rows > 0 && shape.in > 0 && shape.out > 0;
  }
  KernelTable<float>& f32_kernels() const { return *all_.f32_kernels(); }
  DeviceKernels& all_;
  MemoryPool& memory_;
  const Products products_;
};

extern template class HalfKernels<f16>;
extern template class HalfKernels<bf16>;

}  // namespace tessera::nn
