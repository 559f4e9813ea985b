// The gradient of one tensor, while a backward runs.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn {

/// Where a backward writes: `accumulate` false means that the memory holds nothing yet and must be overwritten.
struct GradientTarget {
  Tensor tensor;
  bool accumulate = false;
};

/// The first writer overwrites, later ones add. Memory comes from the pool at the first write, unless it was bound (a
/// parameter's gradient is a view of a flat buffer).
class TESSERA_API Gradient {
 public:
  Gradient(Context& context, Shape shape, DType dtype) : context_(context), shape_(std::move(shape)), dtype_(dtype) {}

  /// Claims the memory for one writer, who must then write (or add) all of it.
  GradientTarget write();
  /// As write(), but takes over the memory of `finished` where nobody else reads it: for element-wise backwards, which
  /// may run in place on their output's gradient. `finished` must not be read afterwards.
  GradientTarget acquire_reusing(const Gradient& finished);
  /// Hands over a finished gradient of the same count. The first one is shared, not copied; a later one is added.
  /// Shared memory is never written: whoever adds to it while another still holds it continues in a copy.
  void accumulate(const Tensor& gradient);

  bool written() const { return written_; }
  /// Throws InvalidUsage where nothing was written.
  const Tensor& value() const;
  /// Forgets the value; owned memory is released, bound memory stays bound.
  void clear();

  /// Lends memory. `keep`: it holds the gradient of earlier microbatches, so that the first writer adds too.
  void bind(void* data, bool keep);
  void unbind();
  bool bound() const { return bound_; }
  /// What own memory is booked under; `gradient` for leaves.
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
