// Half-precision kernels built from a device's f32 kernels: inputs are converted to f32 in scratch of the pool, the f32
// kernel runs, and its outputs are rounded once. Scratch follows the order of the compute stream, so this works on
// streams that run work later.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn {

/// The f32 scratch memory of one call.
template <class T>
class F32Scratch {
 public:
  F32Scratch(DeviceKernels& all, MemoryPool& memory, Stream& stream) : all_(all), memory_(memory), stream_(stream) {}
  ~F32Scratch() {
    if (stream_.immediate() || buffers_.empty()) return;
    stream_.hold(std::make_shared<std::vector<Buffer>>(std::move(buffers_)));
  }
  F32Scratch(const F32Scratch&) = delete;
  F32Scratch& operator=(const F32Scratch&) = delete;

  float* room(std::size_t count) {
    buffers_.push_back(memory_.allocate(count * sizeof(float), MemoryCategory::activation));
    return static_cast<float*>(buffers_.back().data());
  }
  /// Returns null if `like` is null.
  float* room_for(const T* like, std::size_t count) { return like == nullptr ? nullptr : room(count); }
  void load(const T* from, float* to, std::size_t count) {
    if (from != nullptr && count > 0) all_.convert(stream_, {from, dtype_of<T>, to, DType::f32, count});
  }
  void store(const float* from, T* to, std::size_t count) {
    if (to != nullptr && count > 0) all_.convert(stream_, {from, DType::f32, to, dtype_of<T>, count});
  }
  /// Returns scratch that holds the values of `from`.
  float* widened(const T* from, std::size_t count) {
    float* to = room_for(from, count);
    load(from, to, count);
    return to;
  }
  /// Returns scratch for the values of `to`, with its present ones if they are added to; null if `to` is null.
  float* target(const T* to, std::size_t count, bool accumulate) {
    return accumulate ? widened(to, count) : room_for(to, count);
  }

 private:
  DeviceKernels& all_;
  MemoryPool& memory_;
  Stream& stream_;
  std::vector<Buffer> buffers_;
};

/// Strided views of one or several memory regions. Interleaved views share their f32 copy.
template <class T>
class F32Views {
 public:
  struct Extents {
    std::size_t batch = 0, positions = 0, heads = 0, dim = 0;
    std::size_t elements() const { return batch * positions * heads * dim; }
  };
  struct Part {
    kernels::HeadsView<T> view;
    Extents extents;
    bool load = true;
  };
  F32Views(F32Scratch<std::remove_const_t<T>>& scratch, std::initializer_list<Part> parts);
  kernels::HeadsView<std::conditional_t<std::is_const_v<T>, const float, float>> of(
      const kernels::HeadsView<T>& view) const;
  /// Rounds all values back to T.
  void store() requires(!std::is_const_v<T>);

 private:
  struct Region {
    T* begin = nullptr;
    std::size_t count = 0, covered = 0;
    bool load = false;
    float* f32 = nullptr;
  };
  F32Scratch<std::remove_const_t<T>>& scratch_;
  std::vector<Region> regions_;
};

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
