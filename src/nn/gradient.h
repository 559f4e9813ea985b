// The gradient of one tensor during a backward.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn {

/// Memory that a backward writes. If `accumulate` is false, the memory holds no value yet and must be overwritten.
struct GradientTarget {
  Tensor tensor;            ///< the memory, of the gradient's shape
  bool accumulate = false;  ///< true: add to the memory's values
};

/// The first write overwrites; later writes add. The first write allocates memory from the pool, unless memory is bound
/// (a parameter's gradient is a view of a flat buffer).
class TESSERA_API Gradient {
 public:
  /// No memory yet; `context` outlives it.
  Gradient(Context& context, Shape shape, DType dtype) : context_(context), shape_(std::move(shape)), dtype_(dtype) {}

  /// Acquires the memory for one writer, which must then write (or add) all elements.
  GradientTarget write();
  /// Like write(), but reuses the memory of `finished` if nothing else reads it. For element-wise backwards, which may
  /// run in place on their output's gradient. `finished` must not be read afterwards.
  GradientTarget acquire_reusing(const Gradient& finished);
  /// Adds a finished gradient of the same count. The first one is shared, not copied; a later one is added. Shared
  /// memory is never written: adding to a gradient whose memory has another owner continues in a copy.
  void accumulate(const Tensor& gradient);

  bool written() const { return written_; }  ///< true if it holds a value
  /// Throws InvalidUsage if nothing was written.
  const Tensor& value() const;
  /// Discards the value; owned memory is released, bound memory stays bound.
  void clear();

  /// Binds external memory. `keep`: it holds the gradient of earlier microbatches, so the first write adds, too.
  void bind(void* data, bool keep);
  void unbind();                         ///< drops the binding and the value
  bool bound() const { return bound_; }  ///< true if it writes bound memory
  /// Memory category of owned memory; `gradient` for leaves.
  void set_use(MemoryCategory use) { use_ = use; }

 private:
  Context& context_;
  const Shape shape_;
  const DType dtype_;
  MemoryCategory use_ = MemoryCategory::activation;
  Tensor value_;
  bool written_ = false;
  bool bound_ = false;
};

}  // namespace tessera::nn
